"""The oracle: workers are objects of this process, and calls are function calls on copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.search.local import dense
from tests.search.running import Arguments, World, grad
from tests.search.site import NAMES, Cell, Site
from tests.search.steps import AMBIENT, Backward, Call, Step

__all__ = ["MIXED", "OneProcess"]

MIXED = -1
"""Stands for the contexts of a plain backward through calls of several contexts: a worker's gradients are in
that of the call through which they came. The oracle does not say which; their sum is compared."""


class OneProcess(World):
    """The program in one process of plain PyTorch.

    With `retain_graph` no graph is ever freed. Without, the program's own wishes are followed, so that a
    second backward through a graph raises where PyTorch raises.
    """

    def __init__(self, *, retain_graph: bool) -> None:
        super().__init__()
        self._retain_graph = retain_graph
        self._sites = {name: Site(name, _CallsOf(name, self)) for name in NAMES}
        self._cells: dict[str, Cell] = {}
        self.callers: list[str] = []
        self._label = AMBIENT
        self._labels: set[int] = set()
        self._has_double = False
        self.ledger: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        """The gradients of each context, by the names of leaves. Those of AMBIENT are in `.grad` here."""

    def do(self, step: Step) -> None:
        self._label = AMBIENT  # unless the step says otherwise
        super().do(step)

    # -- calls

    def call(self, call: Call, arguments: Arguments) -> Any:
        self._label = call.context
        if call.function == "cell":
            cell = self._cells.setdefault(call.worker, Cell(call.worker))
            return self.received(cell(*self.passed(arguments, call.worker)))
        args = (*arguments, call.key, call.other)
        keeps = call.mode == "remote"
        return self.call_from("", call.worker, call.function, *args, keeps=keeps)

    def call_from(self, caller: str, to: str, function: str, *args: object, keeps: bool = False) -> Any:
        """A call of a worker, or of the program. If the result is kept there: a ref to it."""
        self.callers.append(caller)
        try:
            result = getattr(self._sites[to], function)(*self.passed(args, to))
        finally:
            self.callers.pop()
        return Kept(self, to, result) if keeps else self.received(result)

    def passed(self, args: Sequence[object], to: str) -> list[Any]:
        """Arguments by value. A ref arrives as what it refers to where that is."""
        copies: dict[int, torch.Tensor] = {}
        passed: list[Any] = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                passed.append(self._copied(arg, copies, is_result=False))
            elif isinstance(arg, Kept) and arg.site == to:
                passed.append(arg.value)
            else:
                passed.append(arg)
        return passed

    def received(self, result: Any) -> Any:
        """Results by value."""
        copies: dict[int, torch.Tensor] = {}
        if isinstance(result, tuple):
            return tuple(self._copied(tensor, copies, is_result=True) for tensor in result)
        return self._copied(result, copies, is_result=True)

    def _copied(
        self, tensor: torch.Tensor, copies: dict[int, torch.Tensor], *, is_result: bool
    ) -> torch.Tensor:
        """One that comes twice is copied once."""
        self._labels.add(self._label)
        if id(tensor) not in copies:
            copies[id(tensor)] = _Crossing.apply(tensor, self._label, is_result)  # type: ignore[no-untyped-call]
        return copies[id(tensor)]

    def call_together(self, calls: Sequence[Call], arguments: Sequence[Arguments]) -> list[Any]:
        return [self.call(call, args) for call, args in zip(calls, arguments, strict=True)]

    # -- backward

    def backward(self, backward: Backward) -> list[torch.Tensor | None]:
        self._label = backward.context  # what refs refer to is fetched in it
        retain_graph = self._retain_graph or backward.retain_graph
        (roots, gradients), wanted = self.roots(backward), self.wanted(backward)
        if backward.how == "grad":
            self._has_double = self._has_double or backward.create_graph
            return grad(roots, gradients, wanted, backward, retain_graph=retain_graph)
        contexts = {backward.context} if backward.how == "context" else self._contexts_of(roots)
        local = backward.context if backward.how == "context" else AMBIENT
        everywhere = self._leaves()
        for leaf in everywhere.values():
            leaf.grad = None
        inputs = wanted if backward.how == "inputs" else None
        torch.autograd.backward(roots, gradients, retain_graph=retain_graph, inputs=inputs)
        remote = contexts.pop() if len(contexts) == 1 else MIXED
        for name, leaf in everywhere.items():
            if leaf.grad is not None:
                held = self.ledger[local if name.startswith("leaf") else remote]
                held[name] = held.get(name, 0) + dense(leaf.grad.detach())
        return []

    def backward_at_once(self, backwards: Sequence[Backward]) -> list[torch.Tensor | None]:
        return [gradient for backward in backwards for gradient in self.backward(backward)]

    def _contexts_of(self, roots: Sequence[torch.Tensor]) -> set[int]:
        """The contexts of the calls that lie behind."""
        stack = [root.grad_fn for root in roots if root.grad_fn is not None]
        crossing: Any = _Crossing._backward_cls
        seen, labels = set(stack), set(self._labels) if self._has_double else set()
        while stack:
            node: Any = stack.pop()
            if isinstance(node, crossing):
                labels.add(node.label)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)
        return labels

    def _leaves(self) -> dict[str, torch.Tensor]:
        return {
            **{f"leaf {index}": leaf for index, leaf in enumerate(self.leaves)},
            **{
                f"{site.name}.{name}": parameter
                for site in self._sites.values()
                for name, parameter in site.parameters.items()
            },
            **{f"{name}.cell": cell.weights for name, cell in self._cells.items()},
        }

    # -- the rest

    def tell(self, worker: str, function: str, *args: object) -> None:
        getattr(self._sites[worker], function)(*args)

    def clear(self, context: int) -> None:
        self.ledger.pop(context, None)

    def detach_all(self) -> None:
        for site in self._sites.values():
            site.detach_all()
        for cell in self._cells.values():
            cell.detach_state()

    def end(self, context: int) -> None:
        self.clear(context)
        self._labels.discard(context)


class Kept:
    """A value that stays on a worker, for who is elsewhere."""

    def __init__(self, world: OneProcess, site: str, value: Any) -> None:
        self._world = world
        self.site = site
        self.value = value

    def fetch(self) -> Any:
        return self._world.received(self.value)


class _CallsOf:
    """How a worker calls others."""

    def __init__(self, name: str, world: OneProcess) -> None:
        self._name = name
        self._world = world

    def call(self, to: str, function: str, *args: object) -> Any:
        return self._world.call_from(self._name, to, function, *args)

    def remote(self, to: str, function: str, *args: object) -> Any:
        return self._world.call_from(self._name, to, function, *args, keeps=True)

    def call_back(self, function: str, *args: object) -> Any:
        return self.call(self._world.callers[-1], function, *args)

    def gradient_apart(self, work: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
        (gradient,) = torch.autograd.grad(work(), [x])
        return gradient


class _Crossing(torch.autograd.Function):
    """A tensor on its way. A result saves something, as all that has a gradient worth having does: without
    retain_graph a second backward through it raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, label: int, is_result: bool) -> torch.Tensor:
        ctx.label = label
        if is_result:
            ctx.save_for_backward(torch.zeros(()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        assert len(ctx.saved_tensors) <= 1  # or it raises
        # The gradient crosses, too: where a worker makes it part of a result, what is behind it belongs to
        # the context of this call, even if the result is fetched in another one.
        return _Crossing.apply(gradient, ctx.label, False), None, None  # type: ignore[no-untyped-call]
