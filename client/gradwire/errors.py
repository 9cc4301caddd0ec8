"""Every error that gradwire raises on purpose.

::

    GradwireError
    ├── LinkError (ConnectionError)         the other process cannot be talked to
    │   ├── ConnectFailed                   nothing answered in the connect timeout
    │   ├── WorkerLost                      it was there and is gone, or was restarted
    │   ├── LinkClosed                      this end closed the link
    │   └── ProtocolError                   the other end does not speak our protocol
    ├── DeadlineExceeded (TimeoutError)     the time given for a call ran out
    ├── Cancelled (CancelledError)          the call was cancelled
    ├── CallRefused                         the worker did not run the function
    │   ├── UnknownFunction (LookupError)   no function of that name is exposed
    │   ├── WrongArguments (TypeError)      the arguments do not fit the signature
    │   ├── AlreadyExists (ValueError)      something of that name is there already
    │   ├── StaleParameters (RuntimeError)  parameters were stepped between a forward and its backward
    │   ├── StepRefused (RuntimeError)      an optimizer step was not made, on any worker
    │   ├── StepTorn (RuntimeError)         it was made on some workers and not, or not known to be, on others
    │   ├── NotFound (LookupError)          no such context, message or ref, or no longer
    │   ├── PermissionDenied (PermissionError)
    │   ├── ResourceExhausted               a limit was reached; `retry_after` may say when to try again
    │   └── Unavailable                     the worker is shutting down
    ├── RemoteError                         the function raised; also the builtin type that it raised
    ├── WireError
    │   ├── Unencodable (TypeError)         a value that cannot travel; says where it is
    │   ├── TypeMismatch (TypeError)        a type that the receiving end does not know, or knows otherwise
    │   └── MalformedMessage (ValueError)   bytes that make no sense
    ├── InvalidDeviceMap (ValueError)       a device map names devices that are not there
    ├── CodecUnavailable (RuntimeError)     one of the ends lacks a codec that was asked for
    ├── CheckpointError (OSError)           a checkpoint cannot be written, is damaged, or is not there
    │   └── CheckpointMismatch (ValueError) it is of another model or optimizer
    ├── InternalError (RuntimeError)        a fault of gradwire's own
    └── ForkedProcess (RuntimeError)        gradwire was used before os.fork()

Errors about another process say which in `worker`. `RemoteError` keeps the remote type and traceback.
`retryable` says of each whether the same may work if it is done again.
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
    """Name and address of the process that it is about, where there is one."""
    _retryable: bool = False

    @property
    def retryable(self) -> bool:
        """Whether the same, done again, may work though nobody has mended anything.

        Never true of what a served function raised. A call may have run though its answer was lost: what must
        not run twice is for the caller to judge. In training, do the whole step again, from `zero_grad` on.
        """
        return self._retryable

    def __init__(self, message: str = "", *, worker: str | None = None) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.worker = worker

    def again(self) -> Self:
        """The same error to raise once more, without the traceback of the first time."""
        copied = copy.copy(self).with_traceback(None)
        if hasattr(copied, "__notes__"):
            # What is noted on one must not show on the other.
            copied.__notes__ = list(copied.__notes__)
        return copied

    def __str__(self) -> str:
        # Not Exception's: mixed-in builtins such as KeyError and OSError would format it their way.
        return self.message


class LinkError(GradwireError, ConnectionError):
    """The other process cannot be talked to."""


class ConnectFailed(LinkError):
    """Nothing answered in the connect timeout, or what answered is no gradwire worker."""

    _retryable = True


class WorkerLost(LinkError):
    """The other process was there and is gone, or was restarted and has forgotten what it held."""

    _retryable = True


class LinkClosed(LinkError):
    """This end closed the link, or the other said goodbye."""

    leaving: bool = False
    """Whether the other process goes altogether, and did not just close this link."""

    @property
    def retryable(self) -> bool:
        return self.leaving


class ProtocolError(LinkError):
    """The other end does not speak this protocol, or broke it."""


class DeadlineExceeded(GradwireError, TimeoutError):
    """The time that was given for a call ran out."""


class Cancelled(GradwireError, concurrent.futures.CancelledError):
    """The call was cancelled before it was done."""


class CallRefused(GradwireError):
    """The worker did not run the function."""


class UnknownFunction(CallRefused, LookupError):
    """No function of that name is exposed; `suggestions` are names like it."""

    suggestions: tuple[str, ...] = ()


class WrongArguments(CallRefused, TypeError):
    """The arguments do not fit the function's signature; nothing ran."""


class NotFound(CallRefused, LookupError):
    """The context, message or ref is not held by the worker, or no longer."""


class AlreadyExists(CallRefused, ValueError):
    """Something of that name is there already; get it, or choose another name."""


class StaleParameters(CallRefused, RuntimeError):
    """Parameters were stepped between a forward and its backward; `parameters` names them.

    Or during one of them that took so long that the step did not wait for it.

    Locally PyTorch fails here, too. For asynchronous training make the module with ``stale="allow"``.
    """

    parameters: tuple[str, ...] = ()
    _retryable = True


class StepRefused(CallRefused, RuntimeError):
    """An optimizer step was certainly not made, on any worker: it can be tried again.

    `reason` says why in a word: "missing" (no gradients), "nonfinite", "busy" (with another trainer), "lost"
    (a worker), or "error".
    """

    reason: str = ""

    @property
    def retryable(self) -> bool:
        return self.reason in ("busy", "lost")


class StepTorn(CallRefused, RuntimeError):
    """An optimizer step was made on some workers and not, or not known to be, on others.

    Go on from a checkpoint: tried again, it would be made twice where it was made. It was not made in this
    process.
    """

    made: tuple[str, ...] = ()
    """The workers that made it."""
    unknown: tuple[str, ...] = ()
    """Those that may have made it: the answer was lost."""
    failed: tuple[str, ...] = ()
    """Those that did not make it, or failed in the middle of it."""


class PermissionDenied(CallRefused, PermissionError):
    """This caller may not do that."""


class ResourceExhausted(CallRefused):
    """A limit of the worker was reached. `retry_after` says in how many seconds to try again, if known."""

    retry_after: float | None = None
    not_started: bool = False
    """Whether it was refused before anything ran; only then gradwire itself tries again."""

    @property
    def retryable(self) -> bool:
        # A limit on what one client holds does not pass by itself.
        return self.not_started or self._retryable


class Unavailable(CallRefused):
    """The worker is shutting down and takes no new calls."""

    _retryable = True


class WireError(GradwireError):
    """A value or message does not fit the wire."""


class Unencodable(WireError, TypeError):
    """A value that cannot travel. The message names the path to it, e.g. ``args[1]["mask"]``."""


class TypeMismatch(WireError, TypeError):
    """A dataclass, named tuple or enum that the receiving end does not know, or knows with other fields."""


class MalformedMessage(WireError, ValueError):
    """Bytes that make no sense: a length that lies, an unknown dtype, a missing part."""


class InvalidDeviceMap(GradwireError, ValueError):
    """A device map names a device that is not there, or maps two to one."""


class CodecUnavailable(GradwireError, RuntimeError):
    """This process or the other one lacks a codec that tensors were to be compressed with."""


class CheckpointError(GradwireError, OSError):
    """A checkpoint cannot be written or read: the message names the file, and what is wrong with it."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint is sound, but of another model or optimizer; nothing was loaded."""


class InternalError(GradwireError, RuntimeError):
    """A fault of gradwire itself. Please report it; the log of the process named has more."""


class ForkedProcess(GradwireError, RuntimeError):
    """gradwire was used in this process before os.fork(); start processes with "spawn" instead."""


class RemoteError(GradwireError):
    """The served function raised.

    What is raised at the caller is also an instance of the builtin type that was raised there, so
    ``except ValueError`` catches a remote ValueError. `remote_type` names the exact type, and
    `remote_traceback` is the traceback as text.
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
        """Rebuilds what was raised. `types`: qualified names of its type and bases, nearest first."""
        remote_type = types[0] if types else "Exception"
        short_name = remote_type.removeprefix("builtins.")
        error = _remote_error_type(tuple(types))(
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


# Raising these across a call would be taken for something else: the end of a generator, of the program.
_NOT_IMITATED = (StopIteration, StopAsyncIteration, GeneratorExit, BaseExceptionGroup)


def _nearest_builtin(types: tuple[str, ...]) -> type[Exception]:
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
def _remote_error_type(types: tuple[str, ...]) -> type[RemoteError]:
    builtin = _nearest_builtin(types)
    if builtin is Exception:
        return RemoteError
    return type(f"Remote{builtin.__name__}", (RemoteError, builtin), {"__module__": __name__})
