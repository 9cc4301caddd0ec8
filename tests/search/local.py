"""What programs do with tensors in their own process.

All dense tensors have one shape and hold small integers in float64, and so do their gradients: sums come out
exactly the same in whatever order they are taken, so that results can be compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "FAILURE",
    "OPERATIONS",
    "SHAPE",
    "bounded",
    "dense",
    "failing_in_backward",
    "integers",
    "sparse",
    "with_dense_gradient",
    "with_hook",
]

SHAPE = (2, 3)
ROWS = torch.tensor([1, 1])
MIXER = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0], [2.0, 0.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)


def integers(seed: int, *shape: int) -> torch.Tensor:
    """Small ones, none of them zero: it would hide what is multiplied by it."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 5, shape, generator=generator)
    return torch.tensor([-2.0, -1.0, 1.0, 2.0, 3.0], dtype=torch.float64)[drawn]


def bounded(x: torch.Tensor) -> torch.Tensor:
    """One of 1 to 4, with the gradient of x: else chains of products would leave the exact integers."""
    return torch.remainder(x, 4) + 1


def with_dense_gradient(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose gradient becomes dense on its way; that of a leaf may be sparse.

    Most operations do not take sparse gradients. In one process those may be summed up with dense ones before
    they come to one, so it is left to chance whether it refuses.
    """
    if x.is_leaf or x.layout is not torch.strided:
        return x
    same: torch.Tensor = _DenseGradient.apply(x)  # type: ignore[no-untyped-call]
    return same


class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else dense(gradient)


def dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.layout is torch.strided else x.to_dense()


def sparse(x: torch.Tensor) -> torch.Tensor:
    """A COO tensor with some elements missing."""
    return (x * MASK).to_sparse() if x.layout is torch.strided else x


FAILURE = "fails on purpose"


def failing_in_backward(x: torch.Tensor) -> torch.Tensor:
    same: torch.Tensor = _Failing.apply(x)  # type: ignore[no-untyped-call]
    return same


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise ValueError(FAILURE)


def with_hook(x: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The same tensor, with a hook, which lets pass that there is no gradient: an argument that a function
    did not use gets none, and torch calls its hooks all the same."""
    if x.requires_grad:
        x.register_hook(lambda gradient: None if gradient is None else hook(gradient))  # type: ignore[no-untyped-call]
    return x


Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _in_dense(operation: Operation) -> Operation:
    return lambda x, y: bounded(operation(dense(x), dense(y)))


def _without_grad(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = x * 2
    return factor * y


def _embedded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ROWS, with_dense_gradient(x), sparse=True) * y


OPERATIONS: dict[str, Operation] = {
    "add": _in_dense(lambda x, y: x + y),
    "subtract": _in_dense(lambda x, y: 2 * x - y),
    "multiply": _in_dense(lambda x, y: x * y),
    "square": _in_dense(lambda x, y: x * x),
    "mix": _in_dense(lambda x, y: x @ MIXER),
    "detach": _in_dense(lambda x, y: x.detach() * y),
    "in place": _in_dense(lambda x, y: (x * 1).mul_(y).add_(1)),
    "view in place": _in_dense(lambda x, y: _row_in_place(x * 1, y)),
    "rows": _in_dense(lambda x, y: torch.cat([x[:1], y[1:]])),
    "first row": _in_dense(lambda x, y: x[:1] + y),
    "view": lambda x, y: dense(x).view(3, 2).view(2, 3),
    "transposed": lambda x, y: dense(x).t().contiguous().t(),
    "no grad": _in_dense(_without_grad),
    "embed": _in_dense(_embedded),
    "to sparse": lambda x, y: sparse(x),
    "sparse twice": lambda x, y: sparse(x) * 2,
    "sparse sum": lambda x, y: sparse(x) + sparse(y),
    "sparse product": _in_dense(lambda x, y: torch.sparse.mm(sparse(x), y.t()) @ y),
    # Not linear: in the process that runs backward, a hook sees the whole gradient once.
    "hook": _in_dense(lambda x, y: with_hook(x * y, lambda gradient: torch.remainder(gradient, 5))),
    "unused": lambda x, y: y,
}


def _row_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[0].mul_(y[1])
    return x
