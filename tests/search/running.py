"""Runs a program step by step in a world: over real workers, or in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tests.search.local import OPERATIONS, SHAPE, dense, integers, with_dense_gradient
from tests.search.site import single
from tests.search.steps import (
    LEAVES,
    AtOnce,
    Backward,
    Call,
    Clear,
    Drop,
    End,
    Local,
    Operand,
    State,
    Step,
    Together,
)

__all__ = ["Arguments", "World", "grad"]

Arguments = tuple[Any, Any]
"""Of a call: tensors, or refs to such."""


class World(ABC):
    """The values of a program so far, and the ways in which the worlds differ."""

    def __init__(self) -> None:
        self.leaves = [integers(1000 + index, *SHAPE).requires_grad_() for index in range(LEAVES)]
        self.values: dict[int, tuple[Any, ...]] = {}
        self.without_gradient: list[int] = []
        """Which of the gradients that the last step asked for are none."""

    # -- what the worlds do each in their own way

    @abstractmethod
    def call(self, call: Call, arguments: Arguments) -> Any:
        """Calls a function, or leaves its result where it is and returns a ref."""

    @abstractmethod
    def call_together(self, calls: Sequence[Call], arguments: Sequence[Arguments]) -> list[Any]:
        """Several calls at the same time."""

    @abstractmethod
    def backward(self, backward: Backward) -> list[torch.Tensor | None]:
        """Runs a backward. The gradients that it returns, if that is its way."""

    @abstractmethod
    def backward_at_once(self, backwards: Sequence[Backward]) -> list[torch.Tensor | None]:
        """Several at the same time."""

    @abstractmethod
    def tell(self, worker: str, function: str, *args: object) -> None:
        """Calls a function about the worker itself."""

    @abstractmethod
    def clear(self, context: int) -> None:
        """Forgets the gradients of a context everywhere."""

    @abstractmethod
    def detach_all(self) -> None:
        """Detaches all that workers keep."""

    @abstractmethod
    def end(self, context: int) -> None:
        """Ends an explicit context."""

    # -- steps

    def do(self, step: Step) -> None:
        """Runs one step. Its values are then in `values`."""
        self.without_gradient = []
        match step:
            case Local():
                self._keep(step.id, self._locally(step))
            case Call():
                self._keep(step.id, self._call(step))
            case Together():
                arguments = [self._own_arguments(call) for call in step.calls]
                results = self.call_together(step.calls, arguments)
                self._keep(step.id, tuple(tensor for result in results for tensor in _tensors(result)))
            case Backward():
                self._keep_gradients(step.id, self.backward(step))
            case AtOnce():
                self._keep_gradients(step.id, self.backward_at_once(step.backwards))
            case State():
                self.tell(step.worker, step.action, step.key)
            case Clear():
                self.clear(step.context)
            case Drop():
                for id in step.steps:
                    self.values.pop(id, None)
            case End():
                self.values.clear()
                self.detach_all()
                self.end(step.context)

    def _keep(self, id: int, value: Any) -> None:
        values = _tensors(value)
        if values:
            self.values[id] = values

    def _keep_gradients(self, id: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Where there is none, the value is of zeros."""
        self.without_gradient = [index for index, gradient in enumerate(gradients) if gradient is None]
        zeros = torch.zeros(SHAPE, dtype=torch.float64)
        self._keep(id, tuple(zeros if gradient is None else _laid_out(gradient) for gradient in gradients))

    def _locally(self, step: Local) -> torch.Tensor:
        left, right = single(self.operand(step.left)), single(self.operand(step.right))
        return OPERATIONS[step.operation](left, right)

    def _call(self, call: Call) -> Any:
        arguments = self._arguments(call)
        if call.mode != "no grad":
            result = self.call(call, arguments)
            if call.mode == "in place" and isinstance(result, torch.Tensor):
                result = (result if result.layout is torch.strided else result.to_dense()).mul_(2)
            return result
        with torch.no_grad():
            result = self.call(call, arguments)
            return tuple(tensor.detach() for tensor in _tensors(result))

    def operand(self, operand: Operand) -> Any:
        """A tensor or a ref."""
        found = self.values.get(operand.step)
        if found is None:
            return self.leaves[operand.step % LEAVES]
        return found[operand.output % len(found)]

    def _arguments(self, call: Call) -> Arguments:
        left, right = self.operand(call.left), self.operand(call.right)
        if call.function == "embed":
            # The gradient that comes back for it is sparse.
            return with_dense_gradient(dense(single(left))), right
        return left, right

    def _own_arguments(self, call: Call) -> Arguments:
        """Of one of several calls at the same time. A function that writes to its argument gets a copy of
        what a ref refers to: else it would be left to chance whether others read what was there before."""
        left, right = self._arguments(call)
        return (single(left) if call.function == "in_place" else left), right

    # -- for the backward of either world

    def roots(self, backward: Backward) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Where it starts, and with which gradients. There is always something to differentiate, even if it
        is of no consequence."""
        anchor = (self.leaves[0] * 0).sum()
        factors = integers(backward.id, len(backward.roots), *SHAPE)
        values = [dense(single(self.operand(root))) for root in backward.roots]
        if not backward.direct:
            pairs = zip(values, factors, strict=True)
            losses = [(value.expand(SHAPE) * factor).sum() + anchor for value, factor in pairs]
            return losses, [None] * len(losses)
        roots = [value for value in values if value.requires_grad]
        gradients = [factor.expand_as(root) for root, factor in zip(roots, factors[:, :1], strict=False)]
        return [*roots, anchor], [*gradients, None]

    def wanted(self, backward: Backward) -> list[torch.Tensor]:
        """What gradients are asked for: a tensor may be there twice. Values that stay elsewhere are not."""
        wanted = [self.operand(operand) for operand in backward.wanted]
        return [value for value in wanted if isinstance(value, torch.Tensor)]


def _laid_out(gradient: torch.Tensor) -> torch.Tensor:
    """How a gradient lies in memory is not compared; but later steps may view it, and write to it."""
    return gradient.contiguous() if gradient.layout is torch.strided else gradient


def grad(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    wanted: Sequence[torch.Tensor],
    backward: Backward,
    *,
    retain_graph: bool,
) -> list[torch.Tensor | None]:
    """torch.autograd.grad, with none for tensors that require no grad instead of an error."""
    asked = [tensor for tensor in wanted if tensor.requires_grad]
    if not asked:
        return [None] * len(wanted)
    found = torch.autograd.grad(
        roots,
        asked,
        gradients,
        retain_graph=retain_graph or backward.create_graph,
        create_graph=backward.create_graph,
        allow_unused=True,
    )
    by_tensor = {id(tensor): gradient for tensor, gradient in zip(asked, found, strict=True)}
    return [by_tensor.get(id(tensor)) for tensor in wanted]


def _tensors(value: Any) -> tuple[Any, ...]:
    """The values of a step: those of floating point, or a ref."""
    values = value if isinstance(value, tuple) else (value,)
    return tuple(one for one in values if not isinstance(one, torch.Tensor) or one.is_floating_point())
