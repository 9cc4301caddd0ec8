"""Calls: a function's name and arguments become a request, the response becomes its result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

from gradwire import wire
from gradwire.api.compression import compression_message
from gradwire.api.device_maps import NO_MAP, DeviceMap
from gradwire.autograd import (
    AutogradMetadata,
    DistEngine,
    capture_modes,
    message_ids,
    message_protos,
    read_short,
    receive_response,
    send_call,
    short_call,
)
from gradwire.errors import Cancelled, DeadlineExceeded, GradwireError, MalformedMessage
from gradwire.peers.current import peer_of
from gradwire.proto.v1 import autograd_pb2, link_pb2, value_pb2
from gradwire.runtime.compression import Compression
from gradwire.runtime.scope import Scope, current_scope, waiting
from gradwire.transport import Link, Payload, ResponseFuture

__all__ = ["CallFuture", "Keywords", "start_call", "start_request", "wait"]


class Keywords:
    """Keyword arguments for the called function only, passed as the last positional argument of a call.

    ``call`` takes a `timeout` itself, and ``create`` a `name`. Parameters of the called function or class
    that have such a name are passed with `Keywords`::

        worker.create("Speaker", gw.Keywords(name="Ada"), name="speaker")

    The short form ``worker.function(timeout=3)`` takes no keywords itself, and passes all of them on.
    """

    __slots__ = ("_keywords",)

    def __init__(self, /, **keywords: object) -> None:
        self._keywords = keywords

    def __repr__(self) -> str:
        return f"Keywords({', '.join(f'{name}={value!r}' for name, value in self._keywords.items())})"


def _merge_keywords(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[Sequence[object], Mapping[str, object]]:
    """The arguments as they are sent, with those of a `Keywords` among the keyword arguments."""
    if not args or not isinstance(args[-1], Keywords):
        return args, kwargs
    more = args[-1]._keywords
    if twice := sorted(more.keys() & kwargs.keys()):
        raise TypeError(f"keyword arguments that are given twice, also in gw.Keywords: {', '.join(twice)}")
    return args[:-1], {**kwargs, **more}


class CallFuture(ResponseFuture):
    """The result of a call, or of another request, that may not be finished yet.

    It is a `concurrent.futures.Future`, and awaitable. Cancelling it cancels the call on the worker.
    """

    def __init__(
        self,
        decode: Callable[[Payload], object],
        on_discarded: Callable[[Payload], object],
        link: Link,
    ) -> None:
        super().__init__()
        self._link = link
        self._decode: Callable[[Payload], object] | None = decode
        self.on_discarded = on_discarded
        self._decode_lock = threading.Lock()
        self._value: object = None

    def result(self, timeout: float | None = None) -> Any:
        try:
            if self.done():
                received = super().result(0)
            else:
                received = waiting(partial(self._wait_for, timeout))
            # The thread that wants the result decodes it, not the link's thread: autograd records the result
            # in the thread that decodes it.
            with self._decode_lock:
                if self._decode is not None:
                    self._value = self._decode(received)
                    self._decode = None
                    self._result = None
            return self._value
        except concurrent.futures.CancelledError as error:
            if isinstance(error, Cancelled):
                raise
            raise Cancelled("the call was cancelled") from None
        finally:
            # An exception's traceback has this frame. If the frame kept `self`, the exception would refer to
            # itself by way of the future, and keep the locals of all its frames until a garbage collection.
            del self

    def _wait_for(self, timeout: float | None) -> Payload:
        try:
            if timeout is None:
                self._link.read_for(self)
            received: Payload = super().result(timeout)
            return received
        finally:
            del self  # as in `result`

    def _on_awaited(self) -> None:
        if not self.done():
            self._link.read_in_background(self)

    def __del__(self) -> None:
        # The result was never decoded, so its refs and autograd messages are released on the worker here.
        if self._decode is not None and self.on_discarded is not None and isinstance(self._result, Payload):
            self.on_discarded(self._result)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        self.when_settled(lambda: loop.call_soon_threadsafe(wake))
        self._on_awaited()
        try:
            yield from done
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result(0)


def start_call(
    link: Link,
    function: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    target: value_pb2.RemoteRef | None = None,
    keep: autograd_pb2.Keep | None = None,
    devices: DeviceMap = NO_MAP,
    compression: Compression | None = None,
    resolve_ref: Callable[[value_pb2.RemoteRef], object] | None = None,
) -> CallFuture:
    """Sends the request of a call. Raises before anything is sent if an argument cannot be encoded.

    `compression` is that of the handle to the worker; None if the call is never compressed, whatever the
    scope says.
    """
    scope = current_scope()
    args, kwargs = _merge_keywords(args, kwargs)
    if scope.deadline is not None and scope.time_left() == 0:
        raise DeadlineExceeded(f"no time left to call {function} on {link.peer}", worker=str(link.peer))
    compressed: autograd_pb2.Compression | None = None
    if compression is not None:
        compressed = compression_message(link, scope.compression or compression, function, target)
    modes = capture_modes(scope)
    plan: wire.SentPlan | None = None
    short: tuple[wire.SentPlan, wire.Flat] | None = None
    if keep is None and compressed is None and devices is NO_MAP:
        planned = _find_plan(link, function, target, modes, args, kwargs)
        if planned is not None:
            plan, _ = planned
            short = planned if plan.is_kept else None
    if short is None:
        codec = None if compressed is None else wire.find_codec(compressed.forward)
        encoder = wire.Encoder(inline_bytes=link.inline_bytes, codec=codec)
        request = autograd_pb2.ForwardWithAutogradRequest(
            function=function,
            target=target,
            keep=keep,
            modes=modes,
            compression=compressed,
            plan=0 if plan is None else plan.number,
        )
        for index, arg in enumerate(args):
            request.args.append(encoder.value(arg, f"args[{index}]"))
        for name, arg in kwargs.items():
            request.kwargs[name].CopyFrom(encoder.value(arg, name))
        if len(kwargs) > 1:
            request.kwarg_names.extend(kwargs)
        request.devices.extend(devices.target_devices(encoder.tensors, link.peer))
    engine = peer_of(scope).engine
    future = CallFuture(
        partial(_decode_response, engine, link, function, plan, devices, compressed, resolve_ref),
        engine.releases.to(link).on_discarded(autograd_pb2.ForwardWithAutogradResponse),
        link,
    )
    tensors = encoder.tensors if short is None else short[1].tensors
    context = engine.ambient if scope.context is None else scope.context
    metadata, released = send_call(engine, tensors, context, link, future)
    try:
        if short is not None:
            body, attachments = short_call(*short, metadata, released)
        else:
            metadata.write(request.autograd)
            request.released.extend(message_protos(released))
            table, attachments = encoder.finish()
            request.tensors.CopyFrom(table)
            link.count_saved(encoder.saved)
            body = request.SerializeToString()
        _send(link, link_pb2.METHOD_FORWARD_WITH_AUTOGRAD, body, attachments, future, scope)
    except BaseException:
        future.cancel()
        raise
    return future


def _find_plan(
    link: Link,
    function: str,
    target: value_pb2.RemoteRef | None,
    modes: autograd_pb2.Modes | None,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> tuple[wire.SentPlan, wire.Flat] | None:
    """The plan of a call and its arguments, taken apart; None if it has none."""
    values = [*args, *kwargs.values()] if kwargs else args
    flat = wire.flatten(values)
    if flat is None:
        return None
    key = (
        function,
        None if target is None else target.SerializeToString(),
        None if modes is None else modes.SerializeToString(),
        len(args),
        *kwargs,
        *flat.key,
    )
    plan = link.plans.plan_for(key, len(values), flat)
    return None if plan is None else (plan, flat)


def start_request(link: Link, method: int, body: bytes, timeout: float | None = None) -> CallFuture:
    """Sends a request that is not a call of a function. The result is the body of its response."""
    future = CallFuture(lambda received: received.body, lambda received: None, link)
    try:
        _send(link, method, body, (), future, current_scope(), timeout)
    except BaseException:
        future.cancel()
        raise
    return future


def _send(
    link: Link,
    method: int,
    body: bytes,
    attachments: Sequence[wire.Attachment],
    future: CallFuture,
    scope: Scope,
    timeout: float | None = None,
) -> None:
    """Sends a request in a scope: with its deadline, and cancelled with what it serves."""
    future.waits_for_link = scope.waits_for_link
    scope.cancel_with_caller(future)
    link.send_request(method, body, attachments, timeout=scope.time_left(timeout), future=future)


def _decode_response(
    engine: DistEngine,
    link: Link,
    function: str,
    plan: wire.SentPlan | None,
    devices: DeviceMap,
    compression: autograd_pb2.Compression | None,
    resolve_ref: Callable[[value_pb2.RemoteRef], object] | None,
    received: Payload,
) -> object:
    what = f"the results of {function}"
    if wire.is_short(received.body):
        return _decode_short(engine, link, what, plan, received)
    response = wire.parse(autograd_pb2.ForwardWithAutogradResponse, received.body)
    decoder = wire.Decoder(
        response.tensors, received.attachments, limits=link.limits, resolve_ref=resolve_ref
    )
    link.count_saved(decoder.saved)
    devices.move_results(decoder.tensors, decoder.devices, link.peer)
    metadata = AutogradMetadata.parse(response.autograd) if response.HasField("autograd") else None
    receive_response(engine, metadata, message_ids(response.released), decoder, link, what, compression)
    result = decoder.value(response.result, "result")
    if plan is not None:
        plan.learn(link.plans, response, result)
    return result


def _decode_short(
    engine: DistEngine, link: Link, what: str, plan: wire.SentPlan | None, received: Payload
) -> object:
    _, number, metadata, released, at = read_short(received.body)
    if plan is None:
        raise MalformedMessage(f"{link.peer} responded in short to a request in full")
    values = plan.result(number).read(received.body, at, received.attachments)
    receive_response(engine, metadata, released, values, link, what)
    (result,) = values.values()
    return result


def wait(future: CallFuture, callee: str) -> Any:
    """Waits for the result of a call. An error gets a note that names the callee; Ctrl-C cancels the call."""
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise
    except GradwireError as error:
        error.add_note(f"while calling {callee}")
        raise
    finally:
        del future  # as in CallFuture.result
