"""References to values that live on a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire.api import calls
from gradwire.autograd import AutogradMessageId
from gradwire.proto.v1 import value_pb2

if TYPE_CHECKING:
    from gradwire.api.workers import RemoteWorker

__all__ = ["RemoteMethod", "RemoteRef"]


class RemoteRef:
    """A value that lives on a worker: an object that a class made, or a result that was kept there.

    Its methods are called there. Passed as an argument it arrives as the value itself on the worker that
    holds it, and as a ref on any other, where it keeps nothing alive. Without a name it goes when the last
    handle of this process goes.
    """

    def __init__(self, worker: RemoteWorker, message: value_pb2.RemoteRef, *, borrowed: bool = False) -> None:
        self._worker = worker
        self._message = message
        # What the destructor needs, which must not look for anything: it may run while Python shuts down.
        self._releases = None if borrowed or not message.handle else worker._releases()
        self._handle = AutogradMessageId(message.peer.id, message.handle)

    @property
    def worker(self) -> RemoteWorker:
        """Where it lives."""
        return self._worker

    @property
    def name(self) -> str | None:
        """The name that it is shared by; None if it is this process's own."""
        return self._message.name or None

    @property
    def class_name(self) -> str:
        return self._message.class_name

    def call(self, method: str, /, *args: object, timeout: float | None = None, **kwargs: object) -> Any:
        """Calls a method there."""
        # Without a name for the future, here and below: an error's traceback would have it.
        return calls.wait(
            self.call_async(method, *args, timeout=timeout, **kwargs),
            f"{self.class_name}.{method} on {self._worker.target}",
        )

    def call_async(
        self, method: str, /, *args: object, timeout: float | None = None, **kwargs: object
    ) -> calls.CallFuture:
        """Starts a call of a method there and returns its future."""
        return self._worker._start(method, args, kwargs, timeout, target=self._message)

    def fetch(self, timeout: float | None = None) -> Any:
        """The value itself, brought here. Gradients flow back through it."""
        return self._worker.call("gradwire.fetch", self, timeout=timeout)

    def delete(self) -> None:
        """Makes the worker let go of it now, whoever else may use it.

        Only who made it can delete what has no name; anybody can delete what has one. What the worker's own
        code shares stays. Raises `PermissionDenied` otherwise.
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
        message.ClearField("handle")  # whoever gets it keeps nothing alive
        message.address = message.address or self._worker.target
        if message.name:
            # A name outlives a restart of the worker, which then has another id.
            message.peer.id = self._worker._link.peer.id
        return message

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<gradwire ref to {self.class_name}{name} on {self._worker.target}>"

    def __del__(self) -> None:
        releases = getattr(self, "_releases", None)
        if releases is not None:
            releases.append(self._handle)


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
