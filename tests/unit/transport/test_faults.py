"""Errors are sent to the other peer, and can be caught there by their type."""

from __future__ import annotations

import inspect

import pytest

from gradwire import errors
from gradwire.proto.v1 import link_pb2
from gradwire.transport import faults

NOT_SENT = {
    # Base classes, of which only subclasses are raised.
    errors.GradwireError,
    errors.CallRefused,
    errors.LinkError,
    errors.WireError,
    errors.RemoteError,
    # Raised where they happen, and never sent as such.
    errors.ForkedProcess,
    errors.CheckpointError,
    errors.CheckpointMismatch,
}
ALL = [
    type_
    for _, type_ in inspect.getmembers(errors, inspect.isclass)
    if issubclass(type_, errors.GradwireError) and type_ not in NOT_SENT
]


def test_errors_of_one_builtin_type_are_of_one_type() -> None:
    """A worker may make up other names each time: no type is made, and kept, for each of them."""
    rebuilt = [
        faults.rebuild(link_pb2.Error(code=link_pb2.Error.CODE_RAISED, types=[name, "builtins.KeyError"]))
        for name in ("odd.One", "odd.Other")
    ]
    assert isinstance(rebuilt[0], KeyError)
    assert type(rebuilt[0]) is type(rebuilt[1])


@pytest.mark.parametrize("type_", ALL)
def test_every_error_keeps_its_type_message_and_worker(type_: type[errors.GradwireError]) -> None:
    error = type_("the message", worker="w (h:1)")
    error.add_note("a note")
    rebuilt = faults.rebuild(faults.describe(error, "here"))
    assert type(rebuilt) is type_
    # If the other peer cannot reach a third process, its message says which peer tried.
    assert str(rebuilt) == ("on here: the message" if issubclass(type_, errors.LinkError) else "the message")
    assert rebuilt.worker == "w (h:1)"
    assert rebuilt.retryable == error.retryable
    assert rebuilt.__notes__ == ["a note"]


RETRYABLE = (errors.ConnectFailed, errors.WorkerLost, errors.Unavailable, errors.StaleParameters)


@pytest.mark.parametrize("type_", [*ALL, errors.RemoteError, errors.CheckpointError])
def test_what_may_work_if_it_is_done_again_says_so(type_: type[errors.GradwireError]) -> None:
    assert type_().retryable == (type_ in RETRYABLE)


@pytest.mark.parametrize("reason", ["busy", "lost", "missing", "nonfinite", "error"])
def test_a_step_may_be_made_again_if_only_others_were_in_the_way(reason: str) -> None:
    refused = errors.StepRefused()
    refused.reason = reason
    assert faults.rebuild(faults.describe(refused, "w")).retryable == (reason in ("busy", "lost"))


def test_a_link_that_was_closed_may_be_opened_again_if_the_other_process_goes() -> None:
    closed = errors.LinkClosed()
    closed.leaving = True
    rebuilt = faults.rebuild(faults.describe(closed, "w"))
    assert isinstance(rebuilt, errors.LinkClosed)
    assert rebuilt.leaving
    assert rebuilt.retryable


def test_what_a_function_raises_is_not_retryable_whatever_it_is() -> None:
    for error in (ConnectionError("no"), TimeoutError("late"), errors.RemoteError("relayed")):
        assert not faults.rebuild(faults.describe(error, "w")).retryable


def test_suggestions_and_retry_hints_travel() -> None:
    unknown = errors.UnknownFunction("no")
    unknown.suggestions = ("encode", "decode")
    exhausted = errors.ResourceExhausted("full")
    exhausted.retry_after = 2.5
    assert faults.rebuild(faults.describe(unknown, "w")).suggestions == ("encode", "decode")  # type: ignore[attr-defined]
    assert faults.rebuild(faults.describe(exhausted, "w")).retry_after == 2.5  # type: ignore[attr-defined]


def test_a_refusal_from_further_on_is_no_longer_one_before_anything_ran() -> None:
    refusal = errors.ResourceExhausted("full")
    refusal.retry_after, refusal.not_started = 0.5, True
    direct = faults.rebuild(faults.describe(refusal, "w"))
    assert isinstance(direct, errors.ResourceExhausted)
    assert direct.not_started
    assert direct.retryable
    relayed = faults.rebuild(faults.describe(direct.again(), "v"))
    assert isinstance(relayed, errors.ResourceExhausted)
    assert not relayed.not_started, "v's own function ran: asking v again would run it twice"
    assert relayed.retry_after == 0.5
    assert relayed.retryable


def test_notes_travel_any_number_of_hops_in_their_order() -> None:
    error: BaseException = ValueError("it failed")
    error.add_note("first")
    for hop in range(3):
        error = faults.rebuild(faults.describe(error, f"w{hop}"))
        error.add_note(f"while calling w{hop}")
    assert isinstance(error, errors.RemoteError)
    notes = [note for note in error.__notes__ if "Traceback of the worker" not in note]
    assert notes == ["first", "while calling w0", "while calling w1", "while calling w2"]
    assert sum("Traceback of the worker" in note for note in error.__notes__) == 1


def test_notes_of_an_error_that_is_raised_again_are_its_own() -> None:
    error = errors.WorkerLost("gone")
    error.add_note("a")
    again = error.again()
    again.add_note("b")
    assert error.__notes__ == ["a"]


class Strange(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("even this fails")


class Stranger(Exception):
    __notes__ = 5  # type: ignore[assignment]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        KeyError("key"),
        Strange("x"),
        Stranger("x"),
        ValueError("\ud800 is no text"),
        SystemExit(3),
        KeyboardInterrupt(),
        ExceptionGroup("several", [ValueError("a"), TypeError("b")]),
        StopIteration(5),
        OSError(2, "No such file", "path"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    ],
)
def test_whatever_a_function_raises_can_be_told(error: BaseException) -> None:
    rebuilt = faults.rebuild(faults.describe(error, "worker"))
    assert isinstance(rebuilt, errors.RemoteError)
    assert rebuilt.remote_type.endswith(type(error).__name__)
    assert rebuilt.worker == "worker"
    assert str(rebuilt)


def test_an_error_is_never_too_large_to_travel() -> None:
    described = faults.describe(ValueError("x" * 10_000_000), "worker")
    assert described.ByteSize() < 300_000
    assert "characters left out" in described.message
    noted = ValueError("x")
    for index in range(1000):
        noted.add_note(f"{index} " + 100_000 * "y")
    described = faults.describe(noted, "worker")
    assert described.ByteSize() < 300_000
    assert described.notes[0].startswith("0 ")
    assert described.notes[-1].startswith("999 ")


def test_an_unknown_code_is_an_internal_error() -> None:
    assert type(faults.rebuild(link_pb2.Error(code=99, message="?"))) is errors.InternalError  # type: ignore[arg-type]
