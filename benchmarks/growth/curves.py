"""The curves: what a step is, and how it gets larger."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

import gradwire as gw
from benchmarks.growth.base import Curve, Place
from benchmarks.growth.crowds import FanOut, call_of_one_client, connect_clients

__all__ = ["curves"]


def _leaf() -> torch.Tensor:
    return torch.ones(16, requires_grad=True)


def _nothing(place: Place, size: int) -> None:
    return None


@contextmanager
def _timed(took: list[float]) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    took.append(time.perf_counter() - begun)


def _calls_in_a_row(place: Place, count: int) -> float:
    took: list[float] = []
    with _timed(took), gw.context() as context:
        y = _leaf()
        for _ in range(count):
            y = place.worker.scale(y)
        context.backward(y.sum())
    return took[0]


def _calls_side_by_side(place: Place, count: int) -> float:
    took: list[float] = []
    with _timed(took), gw.context() as context:
        x = _leaf()
        context.backward(torch.stack([place.worker.scale(x) for _ in range(count)]).sum())
    return took[0]


def _open_contexts(place: Place, count: int) -> ExitStack:
    """Contexts of this client, each with the result of a call that waits for its backward."""
    stack = ExitStack()
    x = _leaf()
    for _ in range(count - 1):
        stack.enter_context(gw.context())
        # Kept by the stack, as the local variable of a program that is not through with it would.
        stack.callback(lambda result: None, place.worker.scale(x))
    return stack


def _nested(place: Place, depth: int) -> float:
    took: list[float] = []
    here, there = place.addresses
    with _timed(took):
        place.worker.nest(_leaf(), depth, here, there).sum().backward()
    return took[0]


def _many_tensors(place: Place, count: int) -> float:
    took: list[float] = []
    tensors = [_leaf() for _ in range(count)]
    with _timed(took):
        torch.stack(place.worker.scale_each(tensors)).sum().backward()  # type: ignore[no-untyped-call]
    return took[0]


def _recurrent(place: Place, count: int) -> float:
    took: list[float] = []
    place.worker.forget()
    x = _leaf()
    with _timed(took):
        torch.stack([place.worker.recur(x) for _ in range(count)]).sum().backward()  # type: ignore[no-untyped-call]
    return took[0]


def _recurrent_loop(place: Place, count: int) -> float:
    took: list[float] = []
    place.worker.forget()
    outs = [_leaf()]
    with _timed(took):
        for _ in range(count):
            outs.append(place.worker.recur(outs[-1]))
        torch.stack(outs).sum().backward()  # type: ignore[no-untyped-call]
    return took[0]


def curves(*, quick: bool) -> list[Curve]:
    """All of them. `quick`: shorter."""

    def sizes(*all_sizes: int) -> tuple[int, ...]:
        return all_sizes[:-2] if quick else all_sizes

    rounds = 3 if quick else 9
    thousand = sizes(1, 3, 10, 30, 100, 300, 1000)
    two_hundred = sizes(1, 3, 6, 12, 25, 50, 100, 200)
    fan_out = FanOut()
    return [
        Curve("calls in one context, in a row", thousand, _nothing, _calls_in_a_row, rounds),
        Curve("calls in one context, side by side", thousand, _nothing, _calls_side_by_side, rounds),
        Curve(
            "live contexts on a worker",
            sizes(1, 10, 100, 1000, 3000, 10_000),
            _open_contexts,
            lambda place, _: _calls_in_a_row(place, 1),
            rounds=rounds * 5,
        ),
        Curve("nesting depth", sizes(1, 2, 4, 8, 16, 32, 64), _nothing, _nested, rounds),
        Curve("tensors in one call", thousand, _nothing, _many_tensors, rounds),
        Curve("recurrent calls, independent", two_hundred, _nothing, _recurrent, rounds),
        Curve("recurrent calls, in a loop", two_hundred, _nothing, _recurrent_loop, rounds),
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
