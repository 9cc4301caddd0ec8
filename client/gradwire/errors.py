"""Every error that gradwire raises on purpose.

::

    GradwireError
    ├── LinkError (ConnectionError)         the other process cannot be reached
    │   ├── ConnectFailed                   no worker responded within the connect timeout
    │   ├── WorkerLost                      the worker was connected and is gone, or was restarted
    │   ├── LinkClosed                      one end closed the link
    │   └── ProtocolError                   the other end does not speak gradwire's protocol
    ├── DeadlineExceeded (TimeoutError)     the time given for a call ran out
    ├── Cancelled (CancelledError)          the call was cancelled
    ├── CallRefused                         the worker did not run the function
    │   ├── UnknownFunction (LookupError)   no function of that name is exposed
    │   ├── WrongArguments (TypeError)      the arguments do not fit the signature
    │   ├── AlreadyExists (ValueError)      the name is taken
    │   ├── StaleParameters (RuntimeError)  parameters were stepped between a forward and its backward
    │   ├── StepRefused (RuntimeError)      an optimizer step was not made, on any worker
    │   ├── StepTorn (RuntimeError)         a step was made on some workers only or in part, or may have been
    │   ├── NotFound (LookupError)          the worker does not hold the context, message or ref (any more)
    │   ├── PermissionDenied (PermissionError)
    │   ├── ResourceExhausted               a limit was reached; `retry_after` may say when to try again
    │   └── Unavailable                     the worker is shutting down
    ├── RemoteError                         the function raised; also an instance of the builtin type
    ├── WireError
    │   ├── Unencodable (TypeError)         a value cannot be sent; the message names the path to it
    │   ├── TypeMismatch (TypeError)        the receiver does not know a type, or with other fields
    │   └── MalformedMessage (ValueError)   received bytes are not a valid message
    ├── InvalidDeviceMap (ValueError)       a device map names devices that do not exist
    ├── CodecUnavailable (RuntimeError)     one of the ends lacks a codec that was chosen
    ├── CheckpointError (OSError)           a checkpoint cannot be written, is damaged, or does not exist
    │   └── CheckpointMismatch (ValueError) a checkpoint is of another model or optimizer
    ├── InternalError (RuntimeError)        a fault in gradwire itself
    └── ForkedProcess (RuntimeError)        gradwire was used before os.fork()

An error about another process names that process in `worker`. `RemoteError` keeps the remote type and
traceback. `retryable` says whether the same operation may succeed if it is repeated.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Self

__all__ = [
    "AlreadyExists",
    "CallRefused",
    "Cancelled",
    "CheckpointError",
    "CheckpointMismatch",
    "CodecUnavailable",
    "ConnectFailed",
    "DeadlineExceeded",
    "ForkedProcess",
    "GradwireError",
    "InternalError",
    "InvalidDeviceMap",
    "LinkClosed",
    "LinkError",
    "MalformedMessage",
    "NotFound",
    "PermissionDenied",
    "ProtocolError",
    "RemoteError",
    "ResourceExhausted",
    "StaleParameters",
    "StepRefused",
    "StepTorn",
    "TypeMismatch",
    "Unavailable",
    "Unencodable",
    "UnknownFunction",
    "WireError",
    "WorkerLost",
    "WrongArguments",
]


class GradwireError(Exception):
    """Base of all errors that gradwire raises on purpose."""

    worker: str | None = None
    """Name and address of the process that the error is about; None if it is about no other process."""
    _retryable: bool = False
    """What `retryable` is, unless a subclass or the constructor says otherwise."""

    @property
    def retryable(self) -> bool:
        """Whether the same operation may succeed if it is repeated, without a change to any program.

        Always False for an error that a served function raised. A call may have run although its response was
        lost: the caller has to decide whether it may run twice. In training, repeat the whole step, starting
        with `zero_grad`.
        """
        return self._retryable

    def __init__(
        self, message: str = "", *, worker: str | None = None, retryable: bool | None = None
    ) -> None:
        """`retryable` overrides the default of the error's type."""
        Exception.__init__(self, message)
        self.message = message
        self.worker = worker
        if retryable is not None:
            self._retryable = retryable

    def again(self) -> Self:
        """A copy of the error, to be raised once more, without the traceback of the first time."""
        copied = copy.copy(self).with_traceback(None)
        if hasattr(copied, "__notes__"):
            # A note that is added to the copy must not appear on the original, nor the reverse.
            copied.__notes__ = list(copied.__notes__)
        return copied

    def __str__(self) -> str:
        # Not inherited: KeyError and OSError, which some errors here derive from, format their messages
        # differently.
        return self.message


class LinkError(GradwireError, ConnectionError):
    """The other process cannot be reached."""


class ConnectFailed(LinkError):
    """No process responded within the connect timeout, or the process that did is no gradwire worker."""

    _retryable = True


class WorkerLost(LinkError):
    """The other process was connected and is gone, or was restarted and no longer holds what it held."""

    _retryable = True


class LinkClosed(LinkError):
    """This end or the other end closed the link."""

    leaving: bool = False
    """Whether the other process shuts down, and did not only close this link."""

    @property
    def retryable(self) -> bool:
        return self.leaving


class ProtocolError(LinkError):
    """The other end does not speak gradwire's protocol, or violated it."""


class DeadlineExceeded(GradwireError, TimeoutError):
    """The time given for a call ran out."""


class Cancelled(GradwireError, concurrent.futures.CancelledError):
    """The call was cancelled before it was done."""


class CallRefused(GradwireError):
    """The worker did not run the function."""


class UnknownFunction(CallRefused, LookupError):
    """The worker exposes no function of that name; `suggestions` are similar names that it exposes."""

    suggestions: tuple[str, ...] = ()


class WrongArguments(CallRefused, TypeError):
    """The arguments do not fit the function's signature; the function did not run."""


class NotFound(CallRefused, LookupError):
    """The worker does not hold the context, message or ref, or does not hold it any more."""


class AlreadyExists(CallRefused, ValueError):
    """The worker has an object of that name already; get that object, or choose another name."""


class StaleParameters(CallRefused, RuntimeError):
    """Parameters were stepped between a forward and its backward; `parameters` names them.

    Or a step was made while one of the two was still running, because it took longer than a step waits.

    PyTorch raises for a local model, too. For asynchronous training create the module with ``stale="allow"``.
    """

    parameters: tuple[str, ...] = ()
    _retryable = True


class StepRefused(CallRefused, RuntimeError):
    """An optimizer step was certainly not made, on any worker, so it may be repeated.

    `reason` says why in one word: "missing" (no gradients), "nonfinite" (gradients), "busy" (a worker steps
    for another trainer), "lost" (a worker), or "error".
    """

    reason: str = ""

    @property
    def retryable(self) -> bool:
        return self.reason in ("busy", "lost")


class StepTorn(CallRefused, RuntimeError):
    """An optimizer step was made on some workers, and on other workers it was not, or may not have been. Or
    an optimizer raised in the middle of the step.

    Continue from a checkpoint: a repeated step would be made twice on the workers that made it. The step was
    not made in this process, unless it was the optimizer here that raised.
    """

    made: tuple[str, ...] = ()
    """The workers that made the step."""
    unknown: tuple[str, ...] = ()
    """The workers that may have made the step: their responses were lost."""
    failed: tuple[str, ...] = ()
    """The workers that did not make the step, or failed in the middle of it."""


class PermissionDenied(CallRefused, PermissionError):
    """The worker does not permit this caller to do that."""


class ResourceExhausted(CallRefused):
    """A limit was reached. `retry_after` says after how many seconds to try again, if that is known."""

    retry_after: float | None = None
    not_started: bool = False
    """Whether the call was refused before anything ran; only then gradwire itself tries again."""

    @property
    def retryable(self) -> bool:
        # A limit on what one client holds is still reached when the client tries again.
        return self.not_started or self._retryable


class Unavailable(CallRefused):
    """The worker is shutting down and takes no new calls."""

    _retryable = True


class WireError(GradwireError):
    """A value cannot be encoded, or a message cannot be decoded."""


class Unencodable(WireError, TypeError):
    """A value cannot be sent. The message names the path to it, e.g. ``args[1]["mask"]``."""


class TypeMismatch(WireError, TypeError):
    """The receiver does not know a dataclass, named tuple or enum, or knows it with other fields."""


class MalformedMessage(WireError, ValueError):
    """Received bytes are not a valid message: a wrong length, an unknown dtype, a missing part."""


class InvalidDeviceMap(GradwireError, ValueError):
    """A device map names a device that does not exist, or maps two devices to the same one."""


class CodecUnavailable(GradwireError, RuntimeError):
    """This process or the other process lacks a codec that was chosen for the tensors of a call."""


class CheckpointError(GradwireError, OSError):
    """A checkpoint cannot be written or read; the message names the file and the reason."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is undamaged, but of another model or optimizer; nothing was loaded."""


class InternalError(GradwireError, RuntimeError):
    """A fault in gradwire itself. Please report it; the log of the process in `worker` has more."""


class ForkedProcess(GradwireError, RuntimeError):
    """gradwire was used in this process before os.fork(); start processes with "spawn" instead."""


class RemoteError(GradwireError):
    """The served function raised.

    The error that the caller gets is also an instance of the builtin type that was raised on the worker:
    ``except ValueError`` catches a remote ValueError. `remote_type` names the exact type, and
    `remote_traceback` is the worker's traceback as text.
    """

    remote_type: str = ""
    remote_traceback: str = ""
    traceback_note: str = ""
    """The note that shows the remote traceback."""

    @classmethod
    def from_remote(
        cls,
        types: Sequence[str],
        message: str,
        traceback: str,
        worker: str | None,
        notes: Sequence[str] = (),
    ) -> RemoteError:
        """The error for an exception on a worker. `types`: qualified names of its type and bases, nearest
        first."""
        remote_type = types[0] if types else "Exception"
        short_name = remote_type.removeprefix("builtins.")
        error = _remote_error_type(_nearest_builtin(types).__name__)(
            f"{short_name}: {message}" if message else short_name, worker=worker
        )
        error.remote_type = remote_type
        error.remote_traceback = traceback
        for note in notes:
            error.add_note(note)
        if traceback:
            where = f" on {worker}" if worker else ""
            error.traceback_note = f"\nTraceback of the worker{where}:\n\n{traceback.rstrip()}"
            error.add_note(error.traceback_note)
        return error


# A `RemoteError` never derives from these: Python would take it for the end of an iteration or of a
# generator, and groups need the exceptions that they hold.
_NOT_IMITATED = (StopIteration, StopAsyncIteration, GeneratorExit, BaseExceptionGroup)


def _nearest_builtin(types: Sequence[str]) -> type[Exception]:
    """The first builtin exception among the type and the bases of a remote exception."""
    for name in types:
        builtin = getattr(builtins, name.removeprefix("builtins."), None) if "." in name else None
        if (
            isinstance(builtin, type)
            and issubclass(builtin, Exception)
            and not issubclass(builtin, _NOT_IMITATED)
        ):
            return builtin
    return Exception


@lru_cache
def _remote_error_type(name: str) -> type[RemoteError]:
    """A subclass of `RemoteError` that is also the builtin type of a name."""
    builtin: type[Exception] = getattr(builtins, name)
    if builtin is Exception:
        return RemoteError
    return type(f"Remote{builtin.__name__}", (RemoteError, builtin), {"__module__": __name__})
