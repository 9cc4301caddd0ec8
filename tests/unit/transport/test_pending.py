"""`Pending` is a `concurrent.futures.Future` to everybody who knows one."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

import pytest

from gradwire.errors import GradwireError, WorkerLost
from gradwire.transport import Pending, Received

SECONDS = 20.0
ANSWER = Received(b"answer")
Outcome = Received | GradwireError


@pytest.fixture(params=[ANSWER, WorkerLost("gone")], ids=["answer", "error"])
def outcome(request: pytest.FixtureRequest) -> Outcome:
    return request.param


def read(pending: Pending) -> object:
    error = pending.exception(0)
    return error if error is not None else pending.result(0)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_what_was_settled_before_anybody_asks(outcome: Outcome) -> None:
    pending = Pending()
    assert not pending.done()
    assert pending.settle(outcome)
    assert pending.done()
    assert not pending.running()
    assert read(pending) is outcome


def test_who_waits_is_woken(outcome: Outcome) -> None:
    pending, found = Pending(), []
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        error = pending.exception(SECONDS)
        found.append(error if error is not None else pending.result(SECONDS))

    thread = in_thread(wait)
    assert waits.wait(SECONDS)
    pending.settle(outcome)
    thread.join(SECONDS)
    assert found == [outcome]


def test_waiting_has_an_end() -> None:
    pending = Pending()
    with pytest.raises(TimeoutError):
        pending.result(0.01)
    with pytest.raises(TimeoutError):
        pending.exception(0.01)


def test_several_are_waited_for_as_they_come(outcome: Outcome) -> None:
    pendings = [Pending() for _ in range(3)]
    pendings[0].settle(ANSWER)
    as_completed = concurrent.futures.as_completed(pendings, SECONDS)
    assert next(as_completed) is pendings[0]
    thread = in_thread(lambda: pendings[2].settle(outcome))
    assert next(as_completed) is pendings[2]
    thread.join(SECONDS)
    done, not_done = concurrent.futures.wait(pendings, SECONDS, concurrent.futures.FIRST_COMPLETED)
    assert (done, not_done) == ({pendings[0], pendings[2]}, {pendings[1]})
    pendings[1].cancel()
    done, not_done = concurrent.futures.wait(pendings, SECONDS)
    assert done == set(pendings)
    assert not_done == set()


def test_the_first_outcome_counts(outcome: Outcome) -> None:
    pending = Pending()
    pending.settle(outcome)
    assert not pending.settle(ANSWER)
    assert not pending.cancel()
    assert read(pending) is outcome


def test_an_answer_that_comes_when_it_was_cancelled_is_shown_to_who_asked() -> None:
    pending, unread = Pending(), []
    pending.unread = unread.append
    assert pending.cancel()
    assert not pending.settle(ANSWER)
    assert unread == [ANSWER]
    with pytest.raises(concurrent.futures.CancelledError):
        pending.result(SECONDS)


def test_callbacks_are_called_once_whenever_they_are_added(outcome: Outcome) -> None:
    pending, called = Pending(), []
    done = threading.Event()
    pending.when_settled(lambda: called.append("before"))
    pending.add_done_callback(lambda future: done.set())
    pending.settle(outcome)
    pending.when_settled(lambda: called.append("after"))
    pending.add_done_callback(lambda future: called.append(future is pending))
    assert done.wait(SECONDS)
    assert called == ["before", "after", True]
