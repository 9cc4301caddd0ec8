"""Converts exceptions to protobuf errors and back."""

from __future__ import annotations

import traceback as traceback_module
from types import TracebackType

from gradwire import errors
from gradwire.proto.v1 import link_pb2

__all__ = ["describe", "rebuild"]

Code = link_pb2.Error

_CODES: tuple[tuple[type[errors.GradwireError], link_pb2.Error.Code], ...] = (
    (errors.UnknownFunction, Code.CODE_UNKNOWN_FUNCTION),
    (errors.WrongArguments, Code.CODE_WRONG_ARGUMENTS),
    (errors.StaleParameters, Code.CODE_STALE_PARAMETERS),
    (errors.AlreadyExists, Code.CODE_ALREADY_EXISTS),
    (errors.StepRefused, Code.CODE_STEP_REFUSED),
    (errors.StepTorn, Code.CODE_STEP_TORN),
    (errors.NotFound, Code.CODE_NOT_FOUND),
    (errors.PermissionDenied, Code.CODE_PERMISSION_DENIED),
    (errors.ResourceExhausted, Code.CODE_RESOURCE_EXHAUSTED),
    (errors.Unavailable, Code.CODE_UNAVAILABLE),
    (errors.MalformedMessage, Code.CODE_MALFORMED),
    (errors.Unencodable, Code.CODE_UNENCODABLE),
    (errors.TypeMismatch, Code.CODE_TYPE_MISMATCH),
    (errors.InvalidDeviceMap, Code.CODE_INVALID_DEVICE_MAP),
    (errors.CodecUnavailable, Code.CODE_CODEC_UNAVAILABLE),
    (errors.Cancelled, Code.CODE_CANCELLED),
    (errors.DeadlineExceeded, Code.CODE_DEADLINE_EXCEEDED),
    (errors.ProtocolError, Code.CODE_PROTOCOL),
    (errors.ConnectFailed, Code.CODE_CONNECT_FAILED),
    (errors.LinkClosed, Code.CODE_LINK_CLOSED),
    (errors.LinkError, Code.CODE_WORKER_LOST),
    (errors.InternalError, Code.CODE_INTERNAL),
)
"""More specific types come first."""

_TYPES: dict[int, type[errors.GradwireError]] = {
    **{code: type_ for type_, code in reversed(_CODES)},
    Code.CODE_WORKER_LOST: errors.WorkerLost,
}


_MAX_TEXT = 64 * 1024
"""A longer message or traceback loses its middle: an error must never be too large to send."""

_MOST_NOTES, _MAX_NOTE = 16, 4096
"""Bounds on the notes of an error: every process that an error passes through adds one."""


_BECAME = ("made", "unknown", "failed")
"""Attributes of StepTorn: what may have happened to a step on a worker."""


def describe(error: BaseException, worker: str) -> link_pb2.Error:
    """Converts an exception to its protobuf form. `worker` says where it was raised,
    unless the error already says so."""
    try:
        return _describe(error, worker)
    except Exception as second:
        # The requester must get a response, however odd the exception is.
        return link_pb2.Error(
            code=Code.CODE_RAISED,
            message=f"({type(second).__name__} while describing it)",
            types=[_text(type(error).__name__), "builtins.Exception"],
            worker=_text(worker),
        )


def _describe(error: BaseException, worker: str) -> link_pb2.Error:
    if isinstance(error, errors.GradwireError) and not isinstance(error, errors.RemoteError):
        for type_, code in _CODES:
            if isinstance(error, type_):
                described = link_pb2.Error(
                    code=code,
                    message=_text(_told_by(error, worker)),
                    worker=_text(error.worker or worker),
                    notes=_notes(error),
                    retryable=error.retryable,
                )
                if isinstance(error, errors.LinkClosed) and error.leaving:
                    described.details.append("leaving")
                if isinstance(error, errors.UnknownFunction):
                    described.details.extend(error.suggestions)
                if isinstance(error, errors.StaleParameters):
                    described.details.extend(error.parameters)
                if isinstance(error, errors.StepTorn):
                    for became in _BECAME:
                        described.details.extend(f"{became} {worker}" for worker in getattr(error, became))
                if isinstance(error, errors.StepRefused):
                    described.details.append(error.reason)
                if isinstance(error, errors.ResourceExhausted):
                    described.retry_after_seconds = error.retry_after or 0.0
                    # A relayed refusal came from another worker, and does not mean that this
                    # worker's function has not started.
                    described.not_started = error.not_started and not _is_relayed(error)
                return described
    if isinstance(error, errors.RemoteError):
        # Raised on another worker and passed through here: the user needs the original type and traceback.
        types = [error.remote_type, *(_qualified(t) for t in type(error).__mro__)]
        trace = f"{_format(error)}\n{error.remote_traceback}" if error.remote_traceback else _format(error)
        message = error.message.split(": ", 1)[1] if ": " in error.message else ""
        return link_pb2.Error(
            code=Code.CODE_RAISED,
            message=_text(message),
            types=types,
            traceback=_text(trace),
            worker=_text(error.worker or worker),
            notes=_notes(error),
        )
    return link_pb2.Error(
        code=Code.CODE_RAISED,
        message=_text(_message(error)),
        types=[_qualified(t) for t in type(error).__mro__ if t is not object],
        traceback=_text(_format(error)),
        worker=_text(worker),
        notes=_notes(error),
    )


def rebuild(error: link_pb2.Error) -> errors.GradwireError:
    """Converts a received protobuf error to the exception to raise."""
    worker = error.worker or None
    if error.code == Code.CODE_RAISED:
        return errors.RemoteError.from_remote(
            list(error.types), error.message, error.traceback, worker, error.notes
        )
    type_ = _TYPES.get(error.code, errors.InternalError)
    rebuilt = type_(error.message, worker=worker, retryable=error.retryable)
    vars(rebuilt)[_RELAYED] = True
    for note in error.notes:
        rebuilt.add_note(note)
    if isinstance(rebuilt, errors.LinkClosed):
        rebuilt.leaving = "leaving" in error.details
    if isinstance(rebuilt, errors.UnknownFunction):
        rebuilt.suggestions = tuple(error.details)
    if isinstance(rebuilt, errors.StaleParameters):
        rebuilt.parameters = tuple(error.details)
    if isinstance(rebuilt, errors.StepTorn):
        for became in _BECAME:
            prefix = f"{became} "
            workers = (d.removeprefix(prefix) for d in error.details if d.startswith(prefix))
            setattr(rebuilt, became, tuple(workers))
    if isinstance(rebuilt, errors.StepRefused):
        rebuilt.reason = next(iter(error.details), "")
    if isinstance(rebuilt, errors.ResourceExhausted):
        rebuilt.retry_after = error.retry_after_seconds or None
        rebuilt.not_started = error.not_started
    return rebuilt


_RELAYED = "_gradwire_came_from_elsewhere"


def _is_relayed(error: errors.GradwireError) -> bool:
    """Whether the error was received from another process."""
    return _RELAYED in vars(error)


def _told_by(error: errors.GradwireError, worker: str) -> str:
    """The message of an error. If this process cannot reach a third process, the
    message says which process tried."""
    is_of_another = isinstance(error, errors.LinkError) and error.worker not in (None, worker)
    return f"on {worker}: {error}" if is_of_another and not _is_relayed(error) else str(error)


def _notes(error: BaseException) -> list[str]:
    """The notes on an error, without the note that holds a remote traceback: the
    traceback is sent in its own field."""
    notes = getattr(error, "__notes__", None)
    if not isinstance(notes, list):
        return []
    shown = getattr(error, "traceback_note", None) if isinstance(error, errors.RemoteError) else None
    kept = [_text(str(note), _MAX_NOTE) for note in notes if note != shown]
    half = _MOST_NOTES // 2
    return kept if len(kept) <= _MOST_NOTES else [*kept[:half], *kept[-half:]]


def _qualified(type_: type) -> str:
    return _text(f"{type_.__module__}.{type_.__qualname__}")


def _text(text: str, most: int = _MAX_TEXT) -> str:
    """Valid UTF-8 text of at most `most` characters, and a line that says how many were left out."""
    if len(text) > most:
        left_out = len(text) - most
        half = most // 2
        text = f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode()


def _message(error: BaseException) -> str:
    try:
        # str() of a KeyError is the repr of its key, which is also what the traceback shows.
        return str(error)
    except Exception:
        return "(its message could not be shown)"


def _format(error: BaseException) -> str:
    # Frames of gradwire itself above the user's function are of no use to the user.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _is_machinery(trace):
        trace = trace.tb_next
    notes = error.__dict__.pop("__notes__", None)
    try:
        return "".join(traceback_module.format_exception(type(error), error, trace))
    finally:
        if notes is not None:
            error.__notes__ = notes


def _is_machinery(trace: TracebackType) -> bool:
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.split(".")[0] in ("gradwire_server", "gradwire")
