"""References to values that live on a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire.api import calls
from gradwire.autograd import AutogradMessageId
from gradwire.proto.v1 import value_pb2

if TYPE_CHECKING:
    from gradwire.api.workers import RemoteWorker

__all__ = ["RemoteMethod", "RemoteRef", "message_of"]


class RemoteRef:
    """A value that lives on a worker: an instance of an exposed class, or a result that was kept there.

    Its methods run on the worker. Passed as an argument, the ref arrives as the value itself on the worker
    that holds the value, and as a ref on any other worker, where it does not keep the value alive. The worker
    drops a value without a name when this process has no ref to it any more.
    """

    def __init__(self, worker: RemoteWorker, message: value_pb2.RemoteRef, *, borrowed: bool = False) -> None:
        self._worker = worker
        self._message = message
        # The destructor needs these two. It must not look anything up: it may run while Python shuts down.
        self._releases = None if borrowed or not message.release_number else worker._releases()
        self._release_id = AutogradMessageId(message.peer.id, message.release_number, 0)

    @property
    def worker(self) -> RemoteWorker:
        """The worker that holds the value."""
        return self._worker

    @property
    def name(self) -> str | None:
        """The name by which every process can get the value; None if the value is this process's own."""
        return self._message.name or None

    @property
    def class_name(self) -> str:
        """The name of the value's class."""
        return self._message.class_name

    def call(self, method: str, /, *args: object, timeout: float | None = None, **kwargs: object) -> Any:
        """Calls a method of the value on the worker, and returns its result."""
        # The future gets no name, here and below: the traceback of an error would keep it alive.
        return calls.wait(
            self.call_async(method, *args, timeout=timeout, **kwargs),
            f"{self.class_name}.{method} on {self._worker.target}",
        )

    def call_async(
        self, method: str, /, *args: object, timeout: float | None = None, **kwargs: object
    ) -> calls.CallFuture:
        """Starts a call of a method of the value, and returns its future."""
        return self._worker._start(method, args, kwargs, timeout, target=self._message)

    def fetch(self, timeout: float | None = None) -> Any:
        """A copy of the value, sent to this process. Gradients flow back through it."""
        return self._worker.call("gradwire.fetch", self, timeout=timeout)

    def delete(self) -> None:
        """Makes the worker drop the value now, even if other processes use it.

        A value without a name can be deleted only by the process that made it, and a value with a name by
        every process. Objects that the worker's own code shares cannot be deleted. Raises `PermissionDenied`
        otherwise.
        """
        self._worker.call("gradwire.delete", self._message.peer.id, self._message.ref, self._message.name)
        self._releases = None

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return calls.wait(
            self._worker._start("__call__", args, kwargs, target=self._message),
            f"{self.class_name} on {self._worker.target}",
        )

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._message.methods:
            raise AttributeError(f"{self.class_name} on {self._worker.target} has no method {name!r}")
        return RemoteMethod(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._message.methods})

    def __gradwire_ref__(self) -> value_pb2.RemoteRef:
        message = value_pb2.RemoteRef()
        message.CopyFrom(self._message)
        message.ClearField("release_number")  # the receiver's ref must not keep the value alive
        message.address = message.address or self._worker.target
        if message.name:
            # The name is still valid after a restart of the worker, which then has another id.
            message.peer.id = self._worker._link.peer.id
        return message

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<gradwire ref to {self.class_name}{name} on {self._worker.target}>"

    def __del__(self) -> None:
        releases = getattr(self, "_releases", None)
        if releases is not None:
            releases.append(self._release_id)


def message_of(ref: RemoteRef) -> value_pb2.RemoteRef:
    """The message that describes a ref: its ids, its name, and the methods of its value.

    Not an attribute of the ref, which would hide a method of the same name.
    """
    return ref._message


class RemoteMethod:
    """A method of an object that lives on a worker."""

    def __init__(self, ref: RemoteRef, name: str) -> None:
        self._ref = ref
        self.__name__ = name

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return calls.wait(
            self._ref._worker._start(self.__name__, args, kwargs, target=self._ref._message),
            f"{self._ref.class_name}.{self.__name__} on {self._ref._worker.target}",
        )

    def __repr__(self) -> str:
        return f"<gradwire method {self.__name__} of {self._ref!r}>"
