"""What trainers and workers share to step optimizers: outcomes, dry runs, unscaling and norms."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypedDict

import torch

from gradwire.errors import GradwireError, StepTorn
from gradwire.torch_internals import coo_values, unscale_and_check

__all__ = [
    "DryRun",
    "StepOutcome",
    "StepRequest",
    "StepSettings",
    "failed_step",
    "sum_of_powers",
    "unscaled",
    "values_of",
]


class StepOutcome:
    """The outcomes of a step on one worker. They are plain strings, because they travel between processes."""

    MADE: Final = "made"
    NOT_MADE: Final = "not made"
    HALF_MADE: Final = "half made"
    """The optimizer raised in the middle of the step: some parameters may be stepped, and others not."""
    UNKNOWN: Final = "unknown"
    """The worker cannot be reached, or has lost the optimizer since (a restart, the end of the lease) and
    cannot know."""


def failed_step(error: GradwireError) -> StepTorn:
    """What to raise if an optimizer, or a hook of it, raised an error of gradwire in the middle of a step.

    Its type speaks of another request than this step, and must not be taken for a word that nothing was done.
    """
    return StepTorn(f"the optimizer failed in the middle of the step: {type(error).__name__}: {error}")


class StepSettings(TypedDict):
    """How all workers are to step."""

    options: list[dict[str, Any]]
    """The options of each group, such as its learning rate, as they are in this step."""
    skip_nonfinite: bool
    """Whether the step is refused if a gradient is not finite."""
    allow_missing: bool
    """Whether the step is made even if the worker has no gradients."""
    inverse_scale: float | None
    """What gradients are multiplied by first, if a GradScaler scaled the loss."""


class StepRequest(StepSettings):
    """What a trainer tells a worker to prepare a step. A plain dict, because it travels between processes."""

    patience: float
    """How many seconds the worker waits for another trainer's step before it refuses this step as busy."""
    keep_place: bool
    """Whether a trainer that is refused as busy keeps its place in the queue for its next request."""


class DryRun:
    """Finds out whether an optimizer can make a step, before it makes the step.

    Adam, for example, does not take sparse gradients, but raises only in the middle of a step, when other
    workers have made theirs. So a step is first made with one-element tensors of the same dtype, number of
    dimensions, device and layout, once for each such kind.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # An optimizer class of the user may have side effects in a step, so it is not run an additional time.
        self._is_known = type(optimizer).__module__.startswith("torch.optim.")
        self._passed: set[object] = set()

    def refusal(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> str | None:
        """Why the step cannot be made; None if it can be made."""
        for parameter, gradient in gradients.items():
            if parameter.dtype != gradient.dtype or parameter.shape != gradient.shape:
                return (
                    f"a gradient of {tuple(gradient.shape)} {gradient.dtype} for a parameter of "
                    f"{tuple(parameter.shape)} {parameter.dtype}: it was changed since backward"
                )
        if not self._is_known:
            return None
        for group in self._optimizer.param_groups:
            pairs = ((p, gradients[p]) for p in group["params"] if p in gradients)
            kinds = {(p.dtype, p.dim(), p.device, gradient.layout) for p, gradient in pairs}
            options = {key: value for key, value in group.items() if key != "params"}
            enabled = frozenset(key for key, value in options.items() if _is_enabled(value))
            for kind in kinds:
                if (kind, enabled) not in self._passed:
                    try:
                        self._step_once(options, *kind)
                    except (RuntimeError, ValueError, TypeError) as error:
                        return f"{type(self._optimizer).__name__}: {error}"
                    self._passed.add((kind, enabled))
        return None

    def _step_once(
        self,
        options: dict[str, Any],
        dtype: torch.dtype,
        dim: int,
        device: torch.device,
        layout: torch.layout,
    ) -> None:
        parameter = torch.nn.Parameter(torch.zeros([1] * dim, dtype=dtype, device=device))
        gradient = torch.zeros_like(parameter)
        parameter.grad = gradient if layout == torch.strided else gradient.to_sparse(layout=layout)
        copies = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()
        }
        type(self._optimizer)([{"params": [parameter], **copies}], **self._required()).step()

    def _required(self) -> dict[str, Any]:
        """Arguments for the constructor: some classes have parameters without a default, such as `lr`."""
        parameters = inspect.signature(type(self._optimizer).__init__).parameters
        return {name: value for name, value in self._optimizer.defaults.items() if name in parameters}


def _is_enabled(option: object) -> bool:
    return True if isinstance(option, torch.Tensor) else bool(option)


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """The explicit elements of a gradient: all of a dense one, the stored ones of a sparse one."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def unscaled(gradient: torch.Tensor, inverse_scale: float) -> tuple[torch.Tensor, bool]:
    """A copy of a gradient multiplied by `inverse_scale`, and whether the gradient was finite.

    The bits are those that a `GradScaler` of torch computes. With an `inverse_scale` of 1 the gradient is
    only checked. Raises ValueError for float16 gradients, as torch does.
    """
    if gradient.dtype is torch.float16 and inverse_scale != 1.0:
        raise ValueError("Attempting to unscale FP16 gradients.")
    # As torch does: coalescing adds entries, which may overflow in half precision, so it comes before the
    # check.
    is_half = gradient.is_sparse and gradient.dtype is torch.float16
    result = gradient.coalesce().clone() if is_half else gradient.clone()
    found = torch.zeros((), device=result.device)
    inverse = torch.full((), inverse_scale, device=result.device)
    values = coo_values(result) if result.is_sparse else result
    unscale_and_check([values], found, inverse)
    return result, not found.item()


def sum_of_powers(gradients: Iterable[torch.Tensor], norm_type: float) -> float:
    """The sum of the powers of all elements, in double precision; for the infinity norm, their maximum.

    Sums of several processes together make the norm over all their gradients.
    """
    parts = []
    for gradient in gradients:
        magnitudes = values_of(gradient).detach().abs().double()
        if magnitudes.numel():
            parts.append(magnitudes.max() if math.isinf(norm_type) else magnitudes.pow(norm_type).sum())
    if not parts:
        return 0.0
    together = torch.stack([part.cpu() for part in parts])
    return float(together.max() if math.isinf(norm_type) else together.sum())
