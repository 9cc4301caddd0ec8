"""In whatever way a thread waits for a call, the link is read for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gradwire.api.calls import CallFuture
from gradwire.transport import Link, Payload, ResponseFuture


class FakeLink:
    """As much of a link as a future uses: it delivers the response when it learns that a thread waits."""

    def __init__(self) -> None:
        self.expected = self.read = 0

    def read_for(self, future: ResponseFuture) -> None:
        self.read += 1
        future.settle(Payload(b"response"))

    def read_in_background(self, future: ResponseFuture) -> None:
        self.expected += 1
        future.settle(Payload(b"response"))


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
def test_the_link_is_read_for_a_thread_that_waits(way: Callable[[CallFuture], Any]) -> None:
    fake: Any = FakeLink()
    link: Link = fake
    future = CallFuture(lambda received: received.body, lambda _: None, link)
    assert way(future) == b"response"
    assert (fake.expected, fake.read) == (1, 0)


def test_a_thread_that_wants_the_result_reads_the_link_itself() -> None:
    fake: Any = FakeLink()
    future = CallFuture(lambda received: received.body, lambda _: None, fake)
    assert future.result() == b"response"
    assert (fake.expected, fake.read) == (0, 1)
