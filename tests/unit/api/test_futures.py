"""Whoever waits for a call, in whatever way, has the link read for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gradwire.api.calls import CallFuture
from gradwire.transport import Link, Payload, ResponseFuture


class Line:
    """As much of a link as a future asks for: answers when it is told that somebody waits."""

    def __init__(self) -> None:
        self.expected = self.read = 0

    def read_for(self, pending: ResponseFuture) -> None:
        self.read += 1
        pending.settle(Payload(b"answer"))

    def read_in_background(self, pending: ResponseFuture) -> None:
        self.expected += 1
        pending.settle(Payload(b"answer"))


def by_await(future: CallFuture) -> object:
    async def wait() -> object:
        return await future

    return asyncio.run(asyncio.wait_for(wait(), 20))


def by_callback(future: CallFuture) -> object:
    told: concurrent.futures.Future[object] = concurrent.futures.Future()
    future.add_done_callback(lambda done: told.set_result(done.result()))
    return told.result(20)


def by_wait(future: CallFuture) -> object:
    assert concurrent.futures.wait([future], 20).done == {future}
    return future.result()


WAYS: Sequence[Callable[[CallFuture], Any]] = (
    by_await,
    by_callback,
    by_wait,
    lambda future: next(concurrent.futures.as_completed([future], 20)).result(),
    lambda future: future.result(timeout=20),
)


@pytest.mark.parametrize("way", WAYS)
def test_the_link_is_read_for_whoever_waits(way: Callable[[CallFuture], Any]) -> None:
    line: Any = Line()
    link: Link = line
    future = CallFuture(lambda received: received.body, lambda _: None, link)
    assert way(future) == b"answer"
    assert (line.expected, line.read) == (1, 0)


def test_one_who_can_reads_itself() -> None:
    line: Any = Line()
    future = CallFuture(lambda received: received.body, lambda _: None, line)
    assert future.result() == b"answer"
    assert (line.expected, line.read) == (0, 1)
