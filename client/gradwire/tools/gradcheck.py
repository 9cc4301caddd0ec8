"""Checks the gradients of remote functions against finite differences and local autograd.

Also measures the error of codecs, against the same call without compression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradwire.autograd import nbytes
from gradwire.runtime.compression import NOT_COMPRESSED, Compression
from gradwire.runtime.scope import current_scope, entered

__all__ = ["CodecReport", "CodecRow", "GradcheckReport", "GradcheckRow", "codec_error", "gradcheck"]

_DIFFERENCE_STEP = 1e-6


@dataclass(frozen=True, slots=True)
class GradcheckRow:
    """The gradient of one input, compared with one reference."""

    input: str
    reference: str
    """"finite differences" or "local autograd"."""
    largest_gradient: float
    largest_error: float
    ok: bool


@dataclass(frozen=True, slots=True)
class GradcheckReport:
    """The result of `gradcheck`. True if all gradients agree with their references."""

    rows: tuple[GradcheckRow, ...]

    def __bool__(self) -> bool:
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'input':<12}{'against':<20}{'largest':>12}{'error':>12}"]
        lines += [
            f"{row.input:<12}{row.reference:<20}{row.largest_gradient:>12.3e}{row.largest_error:>12.3e}"
            f"  {'ok' if row.ok else 'MISMATCH'}"
            for row in self.rows
        ]
        return "\n".join(lines)


def gradcheck(
    fn: Callable[..., Any],
    inputs: torch.Tensor | Sequence[Any],
    *,
    local: Callable[..., Any] | None = None,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> GradcheckReport:
    """Compares the gradients of a (remote) function with finite differences, and with `local` if given.

    The gradients of `inputs` that require grad are checked. These should be float64 or complex128, because
    finite differences of narrower dtypes are dominated by rounding. The result may have any structure: its
    tensors are summed up with fixed random weights, so that every element counts. `local` is the same
    function in this process; its gradients must agree to `tolerance`, too.

    >>> import gradwire as gw, torch
    >>> x = torch.tensor([0.3, -1.2], dtype=torch.float64, requires_grad=True)
    >>> bool(gw.gradcheck(torch.tanh, [x]))
    True
    """
    args = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    checked = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.requires_grad]
    if not checked:
        raise ValueError("no input requires grad: there is nothing to check")
    weights = _Weights(seed)
    gradients = _autograd_gradients(fn, args, checked, weights)
    rows = []
    for index, gradient in zip(checked, gradients, strict=True):
        expected = _finite_differences(fn, args, index, weights)
        rows.append(_row(f"input {index}", "finite differences", gradient, expected, tolerance))
    if local is not None:
        for index, gradient, expected in zip(
            checked, gradients, _autograd_gradients(local, args, checked, weights), strict=True
        ):
            rows.append(_row(f"input {index}", "local autograd", gradient, expected, tolerance))
    return GradcheckReport(tuple(rows))


@dataclass(frozen=True, slots=True)
class CodecRow:
    """The error of compression in one tensor."""

    tensor: str
    """Which tensor it is, for example "result 0" or "gradient of input 1"."""
    bytes: int
    """The size of the tensor, uncompressed."""
    largest: float
    """The largest absolute value of the elements, without compression."""
    largest_error: float
    relative_error: float
    """The norm of the error, divided by the norm of the tensor without compression."""


@dataclass(frozen=True, slots=True)
class CodecReport:
    """The result of `codec_error`."""

    rows: tuple[CodecRow, ...]

    @property
    def relative_error(self) -> float:
        """The largest relative error of all tensors."""
        return max((row.relative_error for row in self.rows), default=0.0)

    def __str__(self) -> str:
        lines = [f"{'tensor':<22}{'bytes':>12}{'largest':>12}{'error':>12}{'relative':>12}"]
        lines += [
            f"{row.tensor:<22}{row.bytes:>12}{row.largest:>12.3e}{row.largest_error:>12.3e}"
            f"{row.relative_error:>12.3e}"
            for row in self.rows
        ]
        return "\n".join(lines)


def codec_error(
    fn: Callable[..., Any],
    inputs: torch.Tensor | Sequence[Any],
    compression: Compression,
    *,
    seed: int = 0,
) -> CodecReport:
    """Measures the error that compression causes in the results of a remote function, and in the gradients of
    the inputs that require grad, compared with the same call without compression.

    The gradients are those of a single backward, so they do not show the effect of error feedback.
    """
    args = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    checked = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.requires_grad]
    weights = _Weights(seed)
    found = []
    for chosen in (NOT_COMPRESSED, replace(compression, error_feedback=False)):
        with entered(current_scope()._replace(compression=chosen)):
            results: list[torch.Tensor] = []
            gradients = (
                _autograd_gradients(_recording(fn, results), args, checked, weights) if checked else []
            )
            if not checked:
                _recording(fn, results)(*args)
            found.append([*results, *gradients])
    names = [f"result {index}" for index in range(len(found[0]) - len(checked))]
    names += [f"gradient of input {index}" for index in checked]
    return CodecReport(tuple(map(_codec_row, names, *found)))


def _recording(fn: Callable[..., Any], results: list[torch.Tensor]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        result = fn(*args)
        results.extend(tensor.detach() for tensor in _tensors(result))
        return result

    return call


def _codec_row(name: str, exact: torch.Tensor, compressed: torch.Tensor) -> CodecRow:
    size = nbytes(exact)
    exact, compressed = _widened(exact), _widened(compressed)
    if not exact.numel():
        return CodecRow(name, 0, 0.0, 0.0, 0.0)
    error = compressed - exact
    norm = float(exact.norm())
    return CodecRow(
        name,
        bytes=size,
        largest=float(exact.abs().max()),
        largest_error=float(error.abs().max()),
        relative_error=float(error.norm()) / norm if norm else float(error.norm()),
    )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in double precision, dense, on the CPU."""
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


class _Weights:
    """Fixed random weights, different for each tensor of a result."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def contract(self, result: Any) -> torch.Tensor:
        """A real scalar that depends on every floating-point element of a result."""
        total = torch.zeros((), dtype=torch.float64)
        for position, tensor in enumerate(_tensors(result)):
            generator = torch.Generator().manual_seed(self._seed + position)
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.rand(real.shape, generator=generator, dtype=torch.float64) + 0.5
            total = total + (real.double() * weights.to(real.device)).sum().cpu()
        return total


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result] if result.is_floating_point() or result.is_complex() else []
    if isinstance(result, dict):
        return [tensor for value in result.values() for tensor in _tensors(value)]
    if isinstance(result, list | tuple):
        return [tensor for value in result for tensor in _tensors(value)]
    return []


def _autograd_gradients(
    fn: Callable[..., Any], args: Sequence[Any], checked: Sequence[int], weights: _Weights
) -> list[torch.Tensor]:
    fresh = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    for index in checked:
        fresh[index].requires_grad_()
    with torch.enable_grad():
        scalar = weights.contract(fn(*fresh))
    wanted = [fresh[index] for index in checked]
    if not scalar.requires_grad:
        return [torch.zeros_like(tensor) for tensor in wanted]
    found = torch.autograd.grad(scalar, wanted, allow_unused=True)
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(wanted, found, strict=True)
    ]


def _finite_differences(
    fn: Callable[..., Any], args: Sequence[Any], index: int, weights: _Weights
) -> torch.Tensor:
    """The gradient by central differences, for each element (or its real and imaginary part) in turn."""
    point = args[index].detach().clone()
    flat = torch.view_as_real(point).reshape(-1) if point.is_complex() else point.reshape(-1)
    slopes = torch.zeros(flat.shape, dtype=torch.float64)
    fixed = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]

    def value(element: int, offset: float) -> float:
        moved = flat.clone()
        moved[element] += offset
        shaped = (
            torch.view_as_complex(moved.reshape(*point.shape, 2))
            if point.is_complex()
            else moved.reshape(point.shape)
        )
        with torch.no_grad():
            return float(weights.contract(fn(*fixed[:index], shaped, *fixed[index + 1 :])))

    for element in range(flat.numel()):
        slopes[element] = (value(element, _DIFFERENCE_STEP) - value(element, -_DIFFERENCE_STEP)) / (
            2 * _DIFFERENCE_STEP
        )
    if point.is_complex():
        return torch.view_as_complex(slopes.reshape(*point.shape, 2))
    return slopes.reshape(point.shape)


def _row(
    name: str, reference: str, gradient: torch.Tensor, expected: torch.Tensor, tolerance: float
) -> GradcheckRow:
    gradient, expected = _widened(gradient), _widened(expected)
    if not gradient.numel():
        return GradcheckRow(name, reference, 0.0, 0.0, True)
    largest = float(expected.abs().max())
    error = float((gradient - expected).abs().max())
    # Comparisons with NaN are false, so a NaN counts as a mismatch.
    return GradcheckRow(name, reference, largest, error, error <= tolerance * max(1.0, largest))
