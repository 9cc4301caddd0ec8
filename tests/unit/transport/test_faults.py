"""Errors travel: what is raised at one end can be caught at the other."""

from __future__ import annotations

import inspect

import pytest

from gradwire import errors
from gradwire.proto.v1 import link_pb2
from gradwire.transport import faults

NOT_SENT = {
    # Families, of which members are raised.
    errors.GradwireError,
    errors.CallRefused,
    errors.WireError,
    errors.RemoteError,
    # Raised where they happen and never sent as such.
    errors.ForkedProcess,
    errors.CheckpointError,
    errors.CheckpointMismatch,
}
ALL = [
    type_
    for _, type_ in inspect.getmembers(errors, inspect.isclass)
    if issubclass(type_, errors.GradwireError) and type_ not in NOT_SENT
]
FURTHER_ON = (errors.LinkError, errors.ConnectFailed, errors.LinkClosed)


@pytest.mark.parametrize("type_", ALL)
def test_every_error_keeps_its_type_message_and_worker(type_: type[errors.GradwireError]) -> None:
    rebuilt = faults.rebuild(faults.describe(type_("the message", worker="w (h:1)"), "here"))
    # A worker that the other end cannot reach is lost, to us, too.
    expected = errors.WorkerLost if type_ in FURTHER_ON else type_
    assert type(rebuilt) is expected
    assert str(rebuilt) == "the message"
    assert rebuilt.worker == "w (h:1)"


def test_suggestions_and_retry_hints_travel() -> None:
    unknown = errors.UnknownFunction("no")
    unknown.suggestions = ("encode", "decode")
    exhausted = errors.ResourceExhausted("full")
    exhausted.retry_after = 2.5
    assert faults.rebuild(faults.describe(unknown, "w")).suggestions == ("encode", "decode")  # type: ignore[attr-defined]
    assert faults.rebuild(faults.describe(exhausted, "w")).retry_after == 2.5  # type: ignore[attr-defined]


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


def test_an_unknown_code_is_an_internal_error() -> None:
    assert type(faults.rebuild(link_pb2.Error(code=99, message="?"))) is errors.InternalError  # type: ignore[arg-type]
