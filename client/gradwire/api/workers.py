"""Handles to workers: what `connect` gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self, overload

from gradwire import wire
from gradwire.api import calls
from gradwire.api.calls import CallFuture
from gradwire.api.device_maps import NO_MAP, Device, DeviceMap
from gradwire.api.function_info import FunctionInfo, function_info
from gradwire.api.refs import RemoteRef
from gradwire.autograd import ContextId, PeerReleases
from gradwire.errors import ConnectFailed, GradwireError, LinkClosed, NotFound
from gradwire.peers.connections import Again, WorkerConnection
from gradwire.peers.current import current_peer
from gradwire.peers.local import LocalPeer
from gradwire.proto.v1 import autograd_pb2, describe_pb2, link_pb2, value_pb2
from gradwire.runtime.compression import NOT_COMPRESSED, Compression
from gradwire.runtime.scope import current_scope, time_left
from gradwire.runtime.scope import timeout as scope_timeout
from gradwire.transport import Link, LinkSettings, Traffic

__all__ = ["RemoteFunction", "RemoteWorker", "caller", "connect"]


class RemoteWorker:
    """Another process that serves functions.

    ``worker.call("encode", x)`` and ``worker.encode(x)`` do the same. Handles are cheap, and may be used
    from any thread.
    """

    def __init__(
        self,
        place: WorkerConnection,
        target: str,
        devices: DeviceMap = NO_MAP,
        compression: Compression = NOT_COMPRESSED,
    ) -> None:
        self._place = place
        self._target = target
        self._devices = devices
        self._compression = compression
        place.join(self)
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
        link = self._place.get(Again.NEEDED if self._was_connected else None)
        self._was_connected = True
        return link

    def _ready(self) -> None:
        """Connects, and checks the device map and the codecs against what the worker has."""
        link = self._link
        self._compression.check(link)
        if self._devices is not NO_MAP:
            self._devices.check(self.describe().devices, str(link.peer))

    # -- calling

    def call(self, function: str, /, *args: object, timeout: float | None = None, **kwargs: object) -> Any:
        """Calls a function and returns its result.

        `timeout` in seconds bounds the whole call, and whatever it calls in turn. Raises
        `DeadlineExceeded` when it runs out, and a `RemoteError` if the function raised. A function that has a
        parameter of that name itself gets it with `gw.Keywords`.
        """
        # Without a name for the future: an error's traceback would have it.
        return calls.wait(
            self.call_async(function, *args, timeout=timeout, **kwargs), f"{function} on {self._target}"
        )

    def call_async(
        self, function: str, /, *args: object, timeout: float | None = None, **kwargs: object
    ) -> CallFuture:
        """Starts a call and returns its future, which can be waited for, awaited, or cancelled.

        Tensors are read while they are sent: do not modify large ones before the future is done.
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
            # The time to connect, if that has to be done first, counts.
            with scope_timeout(timeout):
                return self._start(function, args, kwargs, target=target, keep=keep)
        # State, optimizers and what objects are made of arrive as they are: they are not sent once a step.
        is_exact = keep is not None or function.startswith("gradwire.")
        compression = NOT_COMPRESSED if is_exact else current_scope().compression or self._compression
        return calls.start_call(
            self._link,
            function,
            args,
            kwargs,
            target=target,
            keep=keep,
            devices=self._devices,
            compression=compression,
            resolve_ref=self._adopt,
        )

    # -- values that stay there

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

        Returns a `gw.nn.RemoteModule` for a module and a `RemoteRef` for anything else. It belongs to this
        process and goes with it; with a `name` it is shared with everybody by that name, and stays.

        `stale` says what happens to a backward whose parameters were stepped after the forward: "error"
        (raises `StaleParameters`) or "allow" (goes on with the new ones, for asynchronous training).

        A class that has parameters called `name` or `stale` itself gets them with `gw.Keywords`.
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

    def _adopt(self, message: value_pb2.RemoteRef) -> object:
        """The handle for a ref that came from the worker."""
        is_there = message.peer.id == self._link.peer.id
        # A ref to a third process keeps nothing alive: that one does not know that it was passed on.
        ref = RemoteRef(self, message) if is_there else handle_for(message, current_peer())
        return _module_handles[-1](ref) if message.is_module and _module_handles else ref

    def _releases(self) -> PeerReleases:
        return self._place.engine.releases.to(self._link)

    def ping(self, timeout: float | None = None) -> float:
        """Seconds for a round trip."""
        start = time.perf_counter()
        self._ask(link_pb2.METHOD_PING, b"", timeout)
        return time.perf_counter() - start

    def _ask(self, method: int, body: bytes, timeout: float | None) -> bytes:
        """Asks something other than a call."""
        link = self._link
        future = link.send_request(method, body, timeout=time_left(timeout))
        link.read_for(future)
        answer: bytes = future.result().body
        return answer

    # -- what there is

    def traffic(self) -> Traffic:
        """Bytes that this process and the worker sent each other since their link was opened."""
        return self._link.traffic

    def forget_error_feedback(self) -> None:
        """Forgets, here and on the worker, what rounding left out of earlier gradients: for a new model."""
        self._place.engine.feedback.forget(self._link.peer.id)
        self.call("gradwire.forget_error_feedback")

    def describe(self, timeout: float | None = 30.0) -> describe_pb2.DescribeResponse:
        """What the worker says of itself, as protobuf."""
        request = describe_pb2.DescribeRequest().SerializeToString()
        answer = self._ask(link_pb2.METHOD_DESCRIBE, request, timeout)
        self._description = wire.parse(describe_pb2.DescribeResponse, answer)
        return self._description

    def inspect(self, timeout: float | None = 30.0) -> describe_pb2.InspectResponse:
        """What the worker holds right now, as protobuf: contexts, clients, memory."""
        request = describe_pb2.InspectRequest().SerializeToString()
        return wire.parse(describe_pb2.InspectResponse, self._ask(link_pb2.METHOD_INSPECT, request, timeout))

    def cleanup(self, context: str, timeout: float | None = 30.0) -> bool:
        """Makes the worker let go of a context, named as `inspect` names it. Whether there was such a one."""
        request = autograd_pb2.CleanupContextRequest()
        ContextId.from_text(context).write(request.context)
        answer = self._ask(link_pb2.METHOD_CLEANUP_CONTEXT, request.SerializeToString(), timeout)
        return wire.parse(autograd_pb2.CleanupContextResponse, answer).found

    def functions(self) -> list[FunctionInfo]:
        """What can be called, sorted by name."""
        return [function_info(function) for function in self.describe().functions]

    def __getattr__(self, name: str) -> RemoteFunction:
        if name.startswith("_"):
            raise AttributeError(name)
        return RemoteFunction(self, name)

    def __dir__(self) -> list[str]:
        try:
            served = [function.name for function in (self._description or self.describe(5.0)).functions]
        except GradwireError:
            served = []  # completion must not fail because a worker is away
        return sorted({*super().__dir__(), *served})

    # -- end

    def close(self) -> None:
        """Ends the use of this handle. The link is shared, and ends with the last handle to it."""
        if not self._closed:
            self._closed = True
            self._place.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<gradwire worker at {self._target}{' (closed)' if self._closed else ''}>"


class _ServedDoc:
    """The docstring of a function on a worker, asked for when somebody looks."""

    def __get__(self, function: RemoteFunction | None, owner: type) -> str:
        if function is None:
            return "A function of a worker, to be called like one of one's own."
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


@overload
def connect(
    target: str,
    *,
    connect_timeout: float = ...,
    lost_after: float = ...,
    wait_for_ready: bool = ...,
    same_host: bool = ...,
    max_tensor_elements: int = ...,
    device_map: Mapping[Device, Device] | None = ...,
    compress: Compression | None = ...,
) -> RemoteWorker: ...


@overload
def connect(
    target: list[str] | tuple[str, ...],
    *,
    connect_timeout: float = ...,
    lost_after: float = ...,
    wait_for_ready: bool = ...,
    same_host: bool = ...,
    max_tensor_elements: int = ...,
    device_map: Mapping[Device, Device] | None = ...,
    compress: Compression | None = ...,
) -> list[RemoteWorker]: ...


def connect(
    target: str | list[str] | tuple[str, ...],
    *,
    connect_timeout: float = LinkSettings.connect_timeout,
    lost_after: float = LinkSettings.lost_after,
    wait_for_ready: bool = True,
    same_host: bool = True,
    max_tensor_elements: int = LinkSettings.max_tensor_elements,
    device_map: Mapping[Device, Device] | None = None,
    compress: Compression | None = None,
) -> RemoteWorker | list[RemoteWorker]:
    """Connects to a worker at ``"host:port"`` or ``"unix:path"``, or to several at once.

    Asking again for the same target is cheap: the link is shared. Raises `ConnectFailed` if no worker
    answers within `connect_timeout` seconds. A worker that is out of reach for `lost_after` seconds counts
    as lost: what waits for it then raises `WorkerLost`.

    Both wait, and try again meanwhile. With ``wait_for_ready=False`` nothing waits: connecting fails at the
    first refusal, and so does a call while the link is cut, though the link is still mended.

    A worker on the same host is reached around the network, and large tensors cross in shared memory, where
    both are the same user's and nothing lies between them, such as a proxy. ``same_host=False`` leaves it.

    `max_tensor_elements` bounds what a result may span without that its bytes come, as an expanded tensor
    does: a larger one raises `ResourceExhausted` here. The worker has the same setting for arguments.

    `device_map` says for devices of this process which of the worker's devices arguments go to, e.g.
    ``{"cuda:0": "cuda:1"}``; results come back by the reverse, gradients follow their tensors. Without it
    tensors arrive on the CPU. Raises `InvalidDeviceMap` if either end lacks a device.

    `compress` makes large tensors smaller on their way, e.g. ``gw.Compression(backward="int8")``; without it
    nothing is. Raises `CodecUnavailable` if either end lacks a codec.
    """
    settings = LinkSettings(
        connect_timeout=connect_timeout,
        lost_after=lost_after,
        wait_for_ready=wait_for_ready,
        same_host=same_host,
        max_tensor_elements=max_tensor_elements,
    )
    devices = NO_MAP if device_map is None else DeviceMap(device_map)
    peer = current_peer()
    targets = [target] if isinstance(target, str) else target
    for one in targets:
        _check_address(one)
    compression = compress or NOT_COMPRESSED
    workers = [RemoteWorker(peer.place_for(one, settings), one, devices, compression) for one in targets]
    if len(workers) == 1:
        workers[0]._ready()
    else:
        # In this thread's context, for the deadline in force.
        for ready in [peer.pool.submit(copy_context().run, worker._ready) for worker in workers]:
            ready.result()
    return workers[0] if isinstance(target, str) else workers


def _check_address(target: str) -> None:
    """Fails at once for what can be no address, rather than when the time to connect is over."""
    if target.startswith(("unix:", "dns:", "ipv4:", "ipv6:")):
        return  # gRPC's own forms
    host, _, port = target.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        error = ConnectFailed(f"{target!r} is no address: HOST:PORT or unix:PATH", worker=target)
        error._retryable = False
        raise error


def caller() -> RemoteWorker:
    """In a served function: the process that called it.

    It can be called back if it serves functions itself. Raises LookupError elsewhere.
    """
    server_call = current_scope().server_call
    if server_call is None:
        raise LookupError("gw.caller() is for served functions; nobody called this code")
    link = server_call.link
    if link is None:
        raise LookupError("this function was called by a unary request, which cannot be called back")
    return _CallerHandle(link)


def worker_of(message: value_pb2.RemoteRef, peer: LocalPeer) -> RemoteWorker:
    """A handle to the worker that holds a value."""
    link = peer.find_link(message.peer.id)
    if link is not None:
        return _CallerHandle(link)
    if not message.address:
        raise NotFound(f"the worker that holds {message.class_name} has no address that is known here")
    return RemoteWorker(peer.place_for(message.address, LinkSettings()), message.address)


def handle_for(message: value_pb2.RemoteRef, peer: LocalPeer) -> RemoteRef:
    """A handle for a ref to a value that lives elsewhere, and that somebody else keeps alive."""
    return RemoteRef(worker_of(message, peer), message, borrowed=True)


_module_handles: list[Callable[[RemoteRef], object]] = []


def adopt_modules_with(handle: Callable[[RemoteRef], object]) -> None:
    """Says what stands for a module on a worker. `gradwire.nn` builds on this module, not the reverse."""
    _module_handles.append(handle)


class _CallerHandle(RemoteWorker):
    """Whoever called. Its link is not ours to close, nor to open again."""

    def __init__(self, link: Link) -> None:
        super().__init__(
            WorkerConnection(current_peer().engine, str(link.peer), lambda _: link), str(link.peer)
        )

    def close(self) -> None:
        self._closed = True
