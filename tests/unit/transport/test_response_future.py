"""`ResponseFuture` behaves like any `concurrent.futures.Future`."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

import pytest

from gradwire.errors import GradwireError, WorkerLost
from gradwire.transport import Payload, ResponseFuture

SECONDS = 20.0
RESPONSE = Payload(b"response")
Outcome = Payload | GradwireError


@pytest.fixture(params=[RESPONSE, WorkerLost("gone")], ids=["response", "error"])
def outcome(request: pytest.FixtureRequest) -> Outcome:
    return request.param


def read(future: ResponseFuture) -> object:
    error = future.exception(0)
    return error if error is not None else future.result(0)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_an_outcome_that_was_set_before_it_is_read(outcome: Outcome) -> None:
    future = ResponseFuture()
    assert not future.done()
    assert future.settle(outcome)
    assert future.done()
    assert not future.running()
    assert read(future) is outcome


def test_a_waiting_thread_is_woken(outcome: Outcome) -> None:
    future, found = ResponseFuture(), []
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        error = future.exception(SECONDS)
        found.append(error if error is not None else future.result(SECONDS))

    thread = in_thread(wait)
    assert waits.wait(SECONDS)
    future.settle(outcome)
    thread.join(SECONDS)
    assert found == [outcome]


def test_waiting_has_an_end() -> None:
    future = ResponseFuture()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    with pytest.raises(TimeoutError):
        future.exception(0.01)


def test_several_futures_complete_in_any_order(outcome: Outcome) -> None:
    futures = [ResponseFuture() for _ in range(3)]
    futures[0].settle(RESPONSE)
    as_completed = concurrent.futures.as_completed(futures, SECONDS)
    assert next(as_completed) is futures[0]
    thread = in_thread(lambda: futures[2].settle(outcome))
    assert next(as_completed) is futures[2]
    thread.join(SECONDS)
    done, not_done = concurrent.futures.wait(futures, SECONDS, concurrent.futures.FIRST_COMPLETED)
    assert (done, not_done) == ({futures[0], futures[2]}, {futures[1]})
    futures[1].cancel()
    done, not_done = concurrent.futures.wait(futures, SECONDS)
    assert done == set(futures)
    assert not_done == set()


def test_the_first_outcome_counts(outcome: Outcome) -> None:
    future = ResponseFuture()
    future.settle(outcome)
    assert not future.settle(RESPONSE)
    assert not future.cancel()
    assert read(future) is outcome


def test_a_response_after_a_cancellation_goes_to_on_discarded() -> None:
    future, on_discarded = ResponseFuture(), []
    future.on_discarded = on_discarded.append
    assert future.cancel()
    assert not future.settle(RESPONSE)
    assert on_discarded == [RESPONSE]
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(SECONDS)


def test_callbacks_are_called_once_whenever_they_are_added(outcome: Outcome) -> None:
    future, called = ResponseFuture(), []
    done = threading.Event()
    future.when_settled(lambda: called.append("before"))
    future.add_done_callback(lambda future: done.set())
    future.settle(outcome)
    future.when_settled(lambda: called.append("after"))
    future.add_done_callback(lambda future: called.append(future is future))
    assert done.wait(SECONDS)
    assert called == ["before", "after", True]
