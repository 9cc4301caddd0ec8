"""The curves: what a step is, and how it gets larger."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradwire as gw
from benchmarks.growth import served
from benchmarks.growth.base import Curve, Place
from benchmarks.growth.crowds import FanOut, call_of_one_client, connect_clients

__all__ = ["curves"]


def _in_a_row(far: Any, leaves: list[Tensor], count: int) -> Tensor:
    y = leaves[0]
    for _ in range(count):
        y = far.scale(y)
    return y


def _side_by_side(far: Any, leaves: list[Tensor], count: int) -> Tensor:
    return torch.stack([far.scale(leaves[0]) for _ in range(count)])


def _nested(far: Any, leaves: list[Tensor], depth: int) -> Tensor:
    result: Tensor = far.nest(leaves[0], depth)
    return result


def _many_tensors(far: Any, leaves: list[Tensor], count: int) -> Tensor:
    return torch.stack(far.scale_each(leaves))


def _recurrent(far: Any, leaves: list[Tensor], count: int) -> Tensor:
    return torch.stack([far.recur(leaves[0]) for _ in range(count)])


def _recurrent_loop(far: Any, leaves: list[Tensor], count: int) -> Tensor:
    outs = [leaves[0]]
    for _ in range(count):
        outs.append(far.recur(outs[-1]))
    return torch.stack(outs)


class OneProcess:
    """The far side in this process, to know what a step has to come to."""

    scale = staticmethod(served.scale)
    scale_each = staticmethod(served.scale_each)
    recur = staticmethod(served.recur)
    forget = staticmethod(served.forget)

    def nest(self, x: Tensor, depth: int) -> Tensor:
        y = served.scale(x)
        return y + self.nest(y, depth - 1) if depth > 1 else y


class Workers:
    """The far side in the workers."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __getattr__(self, function: str) -> gw.RemoteFunction:
        return getattr(self._place.worker, function)  # type: ignore[no-any-return]

    def nest(self, x: Tensor, depth: int) -> Tensor:
        result: Tensor = self._place.worker.nest(x, depth, *self._place.addresses)
        return result


@dataclass(frozen=True)
class Step:
    """Forward and backward through calls. The gradients are compared with those of one process each time."""

    program: Callable[[Any, list[Tensor], int], Tensor]
    in_context: bool = False
    """Whether the pass has a context of its own."""
    leaf_for_each: bool = False
    """Whether there are as many leaves as the size says."""

    def __call__(self, place: Place, size: int) -> float:
        leaves, expected = self._leaves(size), self._leaves(size)
        far = Workers(place)
        far.forget()
        begun = time.perf_counter()
        if self.in_context:
            with gw.context() as context:
                context.backward(self.program(far, leaves, size).sum())
                gradients = context.gradients()
            found: list[Tensor | None] = [gradients[leaf] for leaf in leaves]
        else:
            self.program(far, leaves, size).sum().backward()  # type: ignore[no-untyped-call]
            found = [leaf.grad for leaf in leaves]
        seconds = time.perf_counter() - begun
        served.forget()
        self.program(OneProcess(), expected, size).sum().backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(found, [leaf.grad for leaf in expected])
        return seconds

    def _leaves(self, size: int) -> list[Tensor]:
        return [torch.ones(16, requires_grad=True) for _ in range(size if self.leaf_for_each else 1)]


def _nothing(place: Place, size: int) -> None:
    return None


def _open_contexts(place: Place, count: int) -> ExitStack:
    """Contexts of this client, each with the result of a call that waits for its backward."""
    stack = ExitStack()
    x = torch.ones(16, requires_grad=True)
    for _ in range(count - 1):
        stack.enter_context(gw.context())
        # Kept by the stack, as the local variable of a program that is not through with it would.
        stack.callback(lambda result: None, place.worker.scale(x))
    return stack


def curves(*, quick: bool) -> list[Curve]:
    """All of them. `quick`: shorter."""

    def sizes(*all_sizes: int) -> tuple[int, ...]:
        return all_sizes[:-2] if quick else all_sizes

    rounds = 3 if quick else 9
    thousand = sizes(1, 3, 10, 30, 100, 300, 1000)
    two_hundred = sizes(1, 3, 6, 12, 25, 50, 100, 200)
    fan_out, one_call = FanOut(), Step(_in_a_row, in_context=True)
    return [
        Curve("calls in one context, in a row", thousand, _nothing, Step(_in_a_row, in_context=True), rounds),
        Curve(
            "calls in one context, side by side",
            thousand,
            _nothing,
            Step(_side_by_side, in_context=True),
            rounds,
        ),
        Curve(
            "live contexts on a worker",
            sizes(1, 10, 100, 1000, 3000, 10_000),
            _open_contexts,
            lambda place, _: one_call(place, 1),
            rounds=rounds * 5,
        ),
        Curve("nesting depth", sizes(1, 2, 4, 8, 16, 32, 64), _nothing, Step(_nested), rounds),
        Curve("tensors in one call", thousand, _nothing, Step(_many_tensors, leaf_for_each=True), rounds),
        Curve("recurrent calls, independent", two_hundred, _nothing, Step(_recurrent), rounds),
        Curve("recurrent calls, in a loop", two_hundred, _nothing, Step(_recurrent_loop), rounds),
        Curve(
            "clients of a worker, one calls",
            sizes(1, 3, 10, 30, 100, 250, 500),
            connect_clients,
            call_of_one_client,
            rounds=rounds * 10,
            weighs_worker=True,
        ),
        Curve(
            "workers of a client, a call to each",
            sizes(1, 2, 5, 10, 25, 50),
            fan_out.connect,
            fan_out.step,
            rounds=rounds * 3,
        ),
    ]
