"""What both ends need to step: whether an optimizer can make a step, and norms over many gradients."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradwire.torch_internals import coo_values, unscale_and_check

__all__ = [
    "HALF_MADE",
    "MADE",
    "NOT_MADE",
    "UNKNOWN",
    "Rehearsal",
    "sum_of_powers",
    "unscaled",
    "values_of",
]

MADE, NOT_MADE, UNKNOWN = "made", "not made", "unknown"
HALF_MADE = "half made"
"""What can have become of a step on one worker. Half made: the optimizer failed in the middle of it."""


class Rehearsal:
    """Finds out whether an optimizer can make a step, before it makes it.

    Adam, say, takes no sparse gradients, and says so only in the middle of a step, when other workers have
    made theirs. So a step with small tensors of the same kind is made first, once for each kind.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # One of the user's own may do anything in a step; it is not tried out behind their back.
        self._is_known = type(optimizer).__module__.startswith("torch.optim.")
        self._passed: set[object] = set()

    def refusal(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> str | None:
        """Why the step cannot be made; None if it can."""
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
            switched_on = frozenset(key for key, value in options.items() if _is_on(value))
            for kind in kinds:
                if (kind, switched_on) not in self._passed:
                    try:
                        self._rehearse(options, *kind)
                    except (RuntimeError, ValueError, TypeError) as error:
                        return f"{type(self._optimizer).__name__}: {error}"
                    self._passed.add((kind, switched_on))
        return None

    def _rehearse(
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
        """What the constructor cannot do without."""
        parameters = inspect.signature(type(self._optimizer).__init__).parameters
        return {name: value for name, value in self._optimizer.defaults.items() if name in parameters}


def _is_on(option: object) -> bool:
    return True if isinstance(option, torch.Tensor) else bool(option)


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient, sparse or not."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def unscaled(gradient: torch.Tensor, inverse_scale: float) -> tuple[torch.Tensor, bool]:
    """A gradient without the factor of a `GradScaler`, and whether it was finite; bit for bit as torch's.

    With the inverse scale 1 it is only looked at. Raises ValueError for what torch does not unscale, either.
    """
    if gradient.dtype is torch.float16 and inverse_scale != 1.0:
        raise ValueError("Attempting to unscale FP16 gradients.")
    # As torch does: to add up entries in half precision may overflow, so they are checked after that.
    is_half = gradient.is_sparse and gradient.dtype is torch.float16
    result = gradient.coalesce().clone() if is_half else gradient.clone()
    found = torch.zeros((), device=result.device)
    inverse = torch.full((), inverse_scale, device=result.device)
    values = coo_values(result) if result.is_sparse else result
    unscale_and_check([values], found, inverse)
    return result, not found.item()


def sum_of_powers(gradients: Iterable[torch.Tensor], norm_type: float) -> float:
    """The part of some gradients in a norm over many, in double precision."""
    parts = []
    for gradient in gradients:
        magnitudes = values_of(gradient).detach().abs().double()
        if magnitudes.numel():
            parts.append(magnitudes.max() if math.isinf(norm_type) else magnitudes.pow(norm_type).sum())
    if not parts:
        return 0.0
    together = torch.stack([part.cpu() for part in parts])
    return float(together.max() if math.isinf(norm_type) else together.sum())
