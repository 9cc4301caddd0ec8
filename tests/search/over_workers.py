"""The program over real workers."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from tests.search.running import Arguments, World, grad
from tests.search.site import NAMES, Site
from tests.search.steps import AMBIENT, Backward, Call

import gradwire as gw

__all__ = ["STEP_SECONDS", "OverWorkers", "real_site"]

STEP_SECONDS = 60.0
"""A step that takes longer fails."""

T = TypeVar("T")


class OverWorkers(World):
    """The program with gradwire."""

    def __init__(self, workers: Mapping[str, gw.RemoteWorker]) -> None:
        super().__init__()
        self._workers = workers
        self._cells: dict[str, gw.nn.RemoteModule] = {}
        self._contexts: dict[int, tuple[gw.Context, contextvars.Context]] = {}
        for worker in workers.values():
            worker.reset()

    def _within(self, context: int, work: Callable[[], T]) -> T:
        """Runs something in a context, which is open from its first use on. Contexts take turns in any order,
        as those of asyncio's tasks do."""
        if context == AMBIENT:
            return _in_time(work)
        if context not in self._contexts:
            surroundings = contextvars.copy_context()
            self._contexts[context] = surroundings.run(gw.context().__enter__), surroundings
        # A copy: two threads may be in the same context.
        return self._contexts[context][1].copy().run(_in_time, work)

    # -- calls

    def call(self, call: Call, arguments: Arguments) -> Any:
        return self._within(call.context, lambda: self._start(call, arguments)())

    def _start(self, call: Call, arguments: Arguments) -> Callable[[], Any]:
        """What waits for the result."""
        worker = self._workers[call.worker]
        args = (*arguments, call.key, call.other)
        if call.function == "cell":
            if call.worker not in self._cells:
                self._cells[call.worker] = worker.create("Cell", call.worker)
            cell = self._cells[call.worker]
            return lambda: cell(*arguments)
        if call.mode == "remote":
            return lambda: worker.remote(call.function, *args)
        return worker.call_async(call.function, *args).result

    def call_together(self, calls: Sequence[Call], arguments: Sequence[Arguments]) -> list[Any]:
        waits = []
        for call, args in zip(calls, arguments, strict=True):
            waits.append(self._within(call.context, lambda call=call, args=args: self._start(call, args)))  # type: ignore[misc]
        return [wait() for wait in waits]

    # -- backward

    def backward(self, backward: Backward) -> list[torch.Tensor | None]:
        return self._within(backward.context, lambda: self._backward(backward))

    def _backward(self, backward: Backward) -> list[torch.Tensor | None]:
        (roots, gradients), wanted = self.roots(backward), self.wanted(backward)
        retain_graph = backward.retain_graph
        match backward.how:
            case "grad":
                return grad(roots, gradients, wanted, backward, retain_graph=retain_graph)
            case "context":
                self._contexts[backward.context][0].backward(roots, gradients, retain_graph=retain_graph)
            case "plain":
                torch.autograd.backward(roots, gradients, retain_graph=retain_graph)
            case "inputs":
                torch.autograd.backward(roots, gradients, retain_graph=retain_graph, inputs=wanted)
        return []

    def backward_at_once(self, backwards: Sequence[Backward]) -> list[torch.Tensor | None]:
        start = threading.Barrier(len(backwards))

        def run(backward: Backward) -> list[torch.Tensor | None]:
            start.wait(STEP_SECONDS)
            return self.backward(backward)

        for backward in backwards:
            self._within(backward.context, lambda: None)  # so that no thread has to open it
        with ThreadPoolExecutor(len(backwards)) as pool:
            done = [pool.submit(run, backward) for backward in backwards]
        return [gradient for one in done for gradient in one.result()]

    def gradients(self) -> dict[int, dict[str, torch.Tensor | None]]:
        """All that there are, by context."""
        found: dict[int, dict[str, torch.Tensor | None]] = {}
        for context in (AMBIENT, *self._contexts):
            found[context] = self._within(context, self._remote_gradients)
            local = self._contexts[context][0].gradients() if context else {}
            for index, leaf in enumerate(self.leaves):
                found[context][f"leaf {index}"] = local.get(leaf) if context else leaf.grad
        return found

    def _remote_gradients(self) -> dict[str, torch.Tensor | None]:
        found: dict[str, torch.Tensor | None] = {}
        for name, worker in self._workers.items():
            found.update({f"{name}.{key}": value for key, value in worker.gradients().items()})
        found.update({f"{name}.cell": cell.gradient() for name, cell in self._cells.items()})
        return found

    # -- the rest

    def tell(self, worker: str, function: str, *args: object) -> None:
        self._within(AMBIENT, lambda: self._workers[worker].call(function, *args))

    def clear(self, context: int) -> None:
        if context == AMBIENT:
            for leaf in self.leaves:
                leaf.grad = None
        elif context in self._contexts:
            self._contexts[context][0].zero_grad()
        else:
            return
        for worker in self._workers.values():
            self._within(context, worker.clear)

    def detach_all(self) -> None:
        for name in self._workers:
            self.tell(name, "detach_all")
        for cell in self._cells.values():
            cell.detach_state()

    def end(self, context: int) -> None:
        if context in self._contexts:
            opened, surroundings = self._contexts.pop(context)
            surroundings.run(opened.__exit__, None, None, None)

    def close(self) -> None:
        """Lets go of everything, here and on the workers."""
        self.values.clear()
        for context in list(self._contexts):
            self.end(context)


def _in_time(work: Callable[[], T]) -> T:
    with gw.timeout(STEP_SECONDS):
        return work()


class _CallsToWorkers:
    """How a real worker calls others."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}

    def call(self, to: str, function: str, *args: object) -> Any:
        return gw.connect(self.addresses[to]).call(function, *args)

    def remote(self, to: str, function: str, *args: object) -> Any:
        return gw.connect(self.addresses[to]).remote(function, *args)

    def call_back(self, function: str, *args: object) -> Any:
        return gw.caller().call(function, *args)

    def gradient_apart(self, work: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
        with gw.context() as context:
            context.backward(work())
            return context.gradients().get(x)


def real_site(name: str) -> Site:
    """What a real worker serves."""
    assert name in NAMES
    return Site(name, _CallsToWorkers())
