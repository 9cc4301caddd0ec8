"""Handles to workers and their functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from gradwire import wire
from gradwire.api import calls
from gradwire.api.calls import CallFuture
from gradwire.api.device_maps import NO_MAP, DeviceMap
from gradwire.api.function_info import FunctionInfo, function_info
from gradwire.api.refs import RemoteRef
from gradwire.autograd import ContextId, PeerReleases
from gradwire.errors import GradwireError, LinkClosed, NotFound
from gradwire.peers.current import current_peer
from gradwire.peers.local import LocalPeer
from gradwire.peers.shared_links import Reconnect, SharedLink
from gradwire.proto.v1 import autograd_pb2, describe_pb2, link_pb2, value_pb2
from gradwire.runtime.compression import NOT_COMPRESSED, Compression
from gradwire.runtime.scope import current_scope
from gradwire.runtime.scope import timeout as scope_timeout
from gradwire.transport import Link, LinkSettings, Traffic

__all__ = [
    "RemoteFunction",
    "RemoteWorker",
    "caller",
    "handle_for",
    "link_of",
    "set_module_handle",
    "shared_link_of",
    "start_remote",
    "worker_of",
]


class RemoteWorker:
    """Another process that serves functions.

    ``worker.call("encode", x)`` and ``worker.encode(x)`` do the same. Handles are cheap, and may be used
    from any thread.
    """

    def __init__(
        self,
        shared_link: SharedLink,
        target: str,
        devices: DeviceMap = NO_MAP,
        compression: Compression = NOT_COMPRESSED,
    ) -> None:
        self._shared_link = shared_link
        self._target = target
        self._devices = devices
        self._compression = compression
        shared_link.join(self)
        self._closed = False
        self._was_connected = False
        self._description: describe_pb2.DescribeResponse | None = None

    @property
    def target(self) -> str:
        """The address that was connected to."""
        return self._target

    @property
    def name(self) -> str:
        """The worker's own name."""
        return self._link.peer.name

    @property
    def _link(self) -> Link:
        if self._closed:
            raise LinkClosed(f"this handle to {self._target} was closed", worker=self._target)
        link = self._shared_link.get(Reconnect.WAIT if self._was_connected else None)
        self._was_connected = True
        return link

    def _connect(self) -> None:
        """Connects, and checks the device map and the codecs against the devices and codecs of the worker."""
        link = self._link
        self._compression.check(link)
        if self._devices is not NO_MAP:
            self._devices.check(self.describe().devices, str(link.peer))

    # -- calling

    def call(self, function: str, /, *args: object, timeout: float | None = None, **kwargs: object) -> Any:
        """Calls a function and returns its result.

        `timeout` in seconds bounds the whole call, and the calls that the function makes in turn. Raises
        `DeadlineExceeded` when the time runs out, and a `RemoteError` if the function raised. Pass a
        parameter of the function that is itself called `timeout` with `gw.Keywords`.
        """
        # The future gets no name here: the traceback of an error would keep it alive.
        return calls.wait(
            self.call_async(function, *args, timeout=timeout, **kwargs), f"{function} on {self._target}"
        )

    def call_async(
        self, function: str, /, *args: object, timeout: float | None = None, **kwargs: object
    ) -> CallFuture:
        """Starts a call and returns its future, which can be waited for, awaited, or cancelled.

        Tensors are read while they are sent: do not modify large tensors before the future is done.
        """
        return self._start(function, args, kwargs, timeout)

    def _start(
        self,
        function: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        timeout: float | None = None,
        *,
        target: value_pb2.RemoteRef | None = None,
        keep: autograd_pb2.Keep | None = None,
    ) -> CallFuture:
        if timeout is not None:
            # The timeout includes the time to connect, if the link has to be opened first.
            with scope_timeout(timeout):
                return self._start(function, args, kwargs, target=target, keep=keep)
        # Constructor arguments, states and optimizers are never compressed: they must arrive exactly, and are
        # not sent in every step.
        is_exact = keep is not None or function.startswith("gradwire.")
        return calls.start_call(
            self._link,
            function,
            args,
            kwargs,
            target=target,
            keep=keep,
            devices=self._devices,
            compression=None if is_exact else self._compression,
            resolve_ref=self._make_handle,
        )

    # -- values that stay on the worker

    def create(
        self,
        class_name: str,
        /,
        *args: object,
        name: str | None = None,
        stale: str = "error",
        **kwargs: object,
    ) -> Any:
        """Makes an instance of an exposed class on the worker.

        Returns a `gw.nn.RemoteModule` for a module and a `RemoteRef` for anything else. The instance belongs
        to this process, and the worker drops it when this process ends. With a `name` every process can get
        it by that name, and the worker keeps it.

        `stale` says what happens to a backward whose parameters were stepped after the forward: "error"
        raises `StaleParameters`, "allow" goes on with the new parameters, for asynchronous training.

        Pass parameters of the class that are themselves called `name` or `stale` with `gw.Keywords`.
        """
        if stale not in ("error", "allow"):
            raise ValueError(f'stale is "error" or "allow", not {stale!r}')
        keep = autograd_pb2.Keep(name=name or "", allow_stale=stale == "allow")
        return calls.wait(self._start(class_name, args, kwargs, keep=keep), f"{class_name} on {self._target}")

    def get(self, name: str) -> Any:
        """An object that the worker shares by name."""
        return self.call("gradwire.get", name)

    def remote(
        self, function: str, /, *args: object, timeout: float | None = None, **kwargs: object
    ) -> RemoteRef:
        """Calls a function and leaves its result on the worker."""
        ref: RemoteRef = calls.wait(
            self._start(function, args, kwargs, timeout, keep=autograd_pb2.Keep()),
            f"{function} on {self._target}",
        )
        return ref

    def _make_handle(self, message: value_pb2.RemoteRef) -> object:
        """The handle for a ref that came from the worker."""
        is_held_there = message.peer.id == self._link.peer.id
        # A ref to a value of a third process keeps nothing alive: that process does not know who got the ref.
        ref = RemoteRef(self, message) if is_held_there else handle_for(message, current_peer())
        return _module_handle(ref) if message.is_module and _module_handle is not None else ref

    def _releases(self) -> PeerReleases:
        return self._shared_link.engine.releases.to(self._link)

    def ping(self, timeout: float | None = None) -> float:
        """Sends an empty request. Returns the seconds until its response."""
        start = time.perf_counter()
        self._request(link_pb2.METHOD_PING, b"", timeout, "ping")
        return time.perf_counter() - start

    def _request(self, method: int, body: bytes, timeout: float | None, name: str) -> bytes:
        """Sends a request that is not a call of a function. Returns the body of the response."""
        response: bytes = calls.wait(
            calls.start_request(self._link, method, body, timeout), f"{name} on {self._target}"
        )
        return response

    # -- looking at the worker

    def traffic(self) -> Traffic:
        """The bytes that this process and the worker have sent each other since their link was opened."""
        return self._link.traffic

    def forget_error_feedback(self) -> None:
        """Drops, here and on the worker, the rounding errors that were kept for the next gradients.

        Call it before a new model is trained over the same calls.
        """
        self._shared_link.engine.feedback.forget(self._link.peer.id)
        self.call("gradwire.forget_error_feedback")

    def describe(self, timeout: float | None = 30.0) -> describe_pb2.DescribeResponse:
        """The worker's description of itself, as protobuf: its functions, versions and devices."""
        request = describe_pb2.DescribeRequest().SerializeToString()
        response = self._request(link_pb2.METHOD_DESCRIBE, request, timeout, "describe")
        self._description = wire.parse(describe_pb2.DescribeResponse, response)
        return self._description

    def inspect(self, timeout: float | None = 30.0) -> describe_pb2.InspectResponse:
        """What the worker holds right now, as protobuf: contexts, clients, memory."""
        request = describe_pb2.InspectRequest().SerializeToString()
        response = self._request(link_pb2.METHOD_INSPECT, request, timeout, "inspect")
        return wire.parse(describe_pb2.InspectResponse, response)

    def cleanup(self, context: str, timeout: float | None = 30.0) -> bool:
        """Makes the worker drop a context, named as `inspect` names it. Returns whether the worker held
        it."""
        request = autograd_pb2.CleanupContextRequest()
        ContextId.from_text(context).write(request.context)
        body = request.SerializeToString()
        response = self._request(link_pb2.METHOD_CLEANUP_CONTEXT, body, timeout, "cleanup")
        return wire.parse(autograd_pb2.CleanupContextResponse, response).found

    def functions(self) -> list[FunctionInfo]:
        """The functions and classes that the worker serves, sorted by name."""
        return [function_info(function) for function in self.describe().functions]

    def __getattr__(self, name: str) -> RemoteFunction:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteFunction(self, name)

    def __dir__(self) -> list[str]:
        try:
            served = [function.name for function in (self._description or self.describe(5.0)).functions]
        except GradwireError:
            served = []  # completion in a shell must not fail because a worker cannot be reached
        return sorted({*super().__dir__(), *served})

    # -- end

    def close(self) -> None:
        """Ends the use of this handle. The link is shared, and ends when its last handle is closed."""
        if not self._closed:
            self._closed = True
            self._shared_link.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<gradwire worker at {self._target}{' (closed)' if self._closed else ''}>"


class _ServedDoc:
    """The docstring of a function on a worker, requested from the worker when it is first read."""

    def __get__(self, function: RemoteFunction | None, owner: type) -> str:
        if function is None:
            return "A function of a worker, called like a local function."
        try:
            return function._info().doc
        except (GradwireError, AttributeError):
            return ""


class RemoteFunction:
    __doc__ = _ServedDoc()

    def __init__(self, worker: RemoteWorker, name: str) -> None:
        self._worker = worker
        self.__name__ = self.__qualname__ = name

    def __call__(self, /, *args: object, **kwargs: object) -> Any:
        return calls.wait(
            self._worker._start(self.__name__, args, kwargs), f"{self.__name__} on {self._worker.target}"
        )

    def _info(self) -> FunctionInfo:
        description = self._worker._description or self._worker.describe(5.0)
        for function in description.functions:
            if function.name == self.__name__:
                return function_info(function)
        raise AttributeError(f"{self._worker.target} serves no function {self.__name__!r}")

    @property
    def __signature__(self) -> Any:
        try:
            return self._info().signature
        except GradwireError as error:
            raise AttributeError("__signature__") from error

    def __repr__(self) -> str:
        return f"<gradwire function {self.__name__} at {self._worker.target}>"


def caller() -> RemoteWorker:
    """In a served function: the process that called it.

    It can be called back if it serves functions itself. Raises LookupError elsewhere.
    """
    server_call = current_scope().server_call
    if server_call is None:
        raise LookupError("gw.caller() is for served functions; this code was not called by another process")
    link = server_call.link
    if link is None:
        raise LookupError("this function was called by a unary request, which cannot be called back")
    return _CallerHandle(link)


def worker_of(message: value_pb2.RemoteRef, peer: LocalPeer) -> RemoteWorker:
    """A handle to the worker that holds the value of a ref."""
    link = peer.find_link(message.peer.id)
    if link is not None:
        return _CallerHandle(link)
    if not message.address:
        raise NotFound(f"the worker that holds {message.class_name} has no address that is known here")
    peer.check_may_follow(message.address)
    settings = LinkSettings(tls=peer.tls_for(message.address))
    return RemoteWorker(peer.shared_link_to(message.address, settings), message.address)


def handle_for(message: value_pb2.RemoteRef, peer: LocalPeer) -> RemoteRef:
    """A handle for a ref that was passed on by another process, which keeps the value alive."""
    return RemoteRef(worker_of(message, peer), message, borrowed=True)


_module_handle: Callable[[RemoteRef], object] | None = None


def set_module_handle(make: Callable[[RemoteRef], object]) -> None:
    """Sets what makes the handles for modules on workers.

    `gradwire.training.modules` does so with `RemoteModule`: it imports this module, and not the reverse.
    """
    global _module_handle
    _module_handle = make


# Every public attribute of a handle would hide a served function, or a method, of the same name. So what the
# rooms above need of a handle are functions here.


def link_of(worker: RemoteWorker) -> Link:
    """The link of a handle, opened if need be."""
    return worker._link


def shared_link_of(worker: RemoteWorker) -> SharedLink:
    """The link that a handle shares with the other handles to the same worker."""
    return worker._shared_link


def start_remote(worker: RemoteWorker, function: str, *args: object) -> CallFuture:
    """Starts `worker.remote`: the future's result is a ref to the function's result."""
    return worker._start(function, args, {}, keep=autograd_pb2.Keep())


class _CallerHandle(RemoteWorker):
    """A handle over a link that the other process may have opened: it neither closes nor reopens the link."""

    def __init__(self, link: Link) -> None:
        super().__init__(SharedLink(current_peer().engine, str(link.peer), lambda _: link), str(link.peer))

    def close(self) -> None:
        self._closed = True
