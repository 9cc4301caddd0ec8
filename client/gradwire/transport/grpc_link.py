"""The connecting end of a link over gRPC.

A supervising thread opens the streams, and opens new ones after a cut, until the worker has been
unreachable for too long or was restarted. Other threads read the streams: a received request may run code
that waits for this very link, and the supervising thread must stay free to reconnect.

`GrpcLink` opens two streams, one for bulk data. If the worker is on the same host, a local socket replaces
the second stream and carries all frames. `NativeGrpcLink`, which is to replace it, needs one stream.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import grpc

from gradwire.errors import (
    ConnectFailed,
    DeadlineExceeded,
    GradwireError,
    InternalError,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from gradwire.proto.v1 import link_pb2
from gradwire.system.randomness import between, new_id
from gradwire.system.timers import Timer, call_later
from gradwire.transport import faults, frames
from gradwire.transport.base import Handler, Link, LinkSettings, PeerIdentity
from gradwire.transport.channels import LINK_METHOD, client_options, silence_before_cut
from gradwire.transport.local_streams import LocalStreams
from gradwire.transport.native_session import NativeSession, NativeStream
from gradwire.transport.outbox import Outbox
from gradwire.transport.same_host import client_handshake
from gradwire.transport.session import Session
from gradwire.transport.streams import StreamPair, Streams

__all__ = ["PROTOCOLS", "GrpcLink", "NativeGrpcLink", "new_grpc_link"]

log = logging.getLogger("gradwire.link")

PROTOCOLS = (1, 2)
"""The versions of the protocol that this code speaks: of `GrpcLink`, and of `NativeGrpcLink`."""

_FIRST_BACKOFF, _LAST_BACKOFF = 0.05, 1.0
_HANDSHAKE_SECONDS = 5.0
_GOODBYE_SECONDS = 2.0
_DRAIN_SECONDS = 0.5


class _Broken(Exception):
    """The streams ended; connecting may be tried again."""


class _Connector(Link):
    """Connects a session to a worker that listens. Call `connect` before anything else."""

    PROTOCOL: int
    target: str
    settings: LinkSettings
    peer_max_message_bytes: int

    def _prepare(self, target: str) -> None:
        self.target = target
        self._session_id = new_id()
        self._connect_timeout = self.settings.connect_timeout
        self._wait_for_ready = self.settings.wait_for_ready
        """Whether connecting is tried again until the timeout."""
        self._was_welcomed = False
        self._calls: tuple[Any, ...] = ()
        """The gRPC calls of the streams that are open or being opened."""
        self._is_attached = False
        """Whether the session is attached to the streams."""
        self._break_reason = ""
        """Why the first of the streams broke; empty while all are open."""
        self._connected = threading.Event()
        self._ending = threading.Event()
        self._goodbye_timer: Timer | None = None
        self._supervisor = threading.Thread(
            target=self._supervise, name=f"gradwire-link-{target}", daemon=True
        )

    # -- what the two kinds of links do in their own way

    CHANNELS: tuple[str, ...]
    """A name for each channel that a link needs."""

    @abstractmethod
    def limit_bytes_in_flight(self, max_bytes: int) -> None: ...

    @abstractmethod
    def _new_streams(self) -> Any: ...

    @abstractmethod
    def _run_session(
        self, channels: list[grpc.Channel], streams: Any, attempt: int, give_up_at: float
    ) -> None:
        """Opens the streams, and runs the session over them until they end."""

    @abstractmethod
    def detach(self, streams: Any) -> bool: ...

    def connect(
        self,
        time_left: float | None = None,
        *,
        connect_timeout: float | None = None,
        wait_for_ready: bool | None = None,
    ) -> None:
        """Returns when the worker has responded; raises ConnectFailed if it does not within the timeout.

        `time_left` is the time until the caller's own deadline: DeadlineExceeded if it ends before the
        timeout does. `connect_timeout` and `wait_for_ready` override the settings of the same names.
        """
        if connect_timeout is not None:
            self._connect_timeout = connect_timeout
        if wait_for_ready is not None:
            self._wait_for_ready = wait_for_ready
        self.when_ended(self._on_end)
        self._supervisor.start()
        longest_wait = self._connect_timeout + _HANDSHAKE_SECONDS
        if time_left is not None and time_left < longest_wait:
            if not self._connected.wait(time_left):
                error = f"no time left to wait for {self.target} to respond"
                self.abort(DeadlineExceeded(error, worker=self.target))
        elif not self._connected.wait(longest_wait):
            self.abort(self._unreachable_error("connecting got stuck"))
        if self.ended is not None:
            self._join_supervisor()
            raise self.ended.again()

    def _on_end(self, _: object) -> None:
        self._ending.set()
        self._connected.set()
        if self._is_attached:
            # The goodbye must be written within this time: a peer that does not
            # read must not keep the threads.
            self._goodbye_timer = call_later(_GOODBYE_SECONDS, self._cut)
        else:
            self._cut()

    def _cut(self) -> None:
        for call in self._calls:
            call.cancel()

    def _join_supervisor(self) -> None:
        if self._supervisor.is_alive() and threading.current_thread() is not self._supervisor:
            self._supervisor.join(2 * _GOODBYE_SECONDS)

    # -- the supervising thread

    def _supervise(self) -> None:
        try:
            with ExitStack() as stack:
                channels = [stack.enter_context(self._channel(role)) for role in self.CHANNELS]
                self._reconnect_until_ended(channels)
        except Exception as error:
            log.exception("the link to %s failed", self.peer)
            self.abort(InternalError(f"the link to {self.peer} failed: {error!r}"))
        finally:
            if self._goodbye_timer is not None:
                self._goodbye_timer.cancel()

    def _reconnect_until_ended(self, channels: list[grpc.Channel]) -> None:
        give_up_at = time.monotonic() + self._connect_timeout
        backoff, attempt = _FIRST_BACKOFF, 0
        while self.ended is None:
            attempt += 1
            streams = self._new_streams()
            reason = ""
            try:
                self._run_session(channels, streams, attempt, give_up_at)
            except _Broken as broken:
                reason = str(broken)
            except GradwireError as error:
                self.abort(error)
            finally:
                self._cut()
                streams.close(discard=True)
            if self.detach(streams):
                log.info("the connection to %s was cut: %s", self.peer, reason)
                give_up_at = time.monotonic() + self.settings.lost_after
                if "ping timeout" in reason or "keepalive watchdog" in reason:  # gRPC has no code for this
                    give_up_at -= silence_before_cut(self.settings)
                backoff = _FIRST_BACKOFF
            is_only_try = not self._was_welcomed and not self._wait_for_ready
            if self.ended is None and (is_only_try or time.monotonic() >= give_up_at):
                self.ended_by_timeout = self._was_welcomed
                self.abort(self._unreachable_error(reason))
            # Full jitter: many clients of one worker must not reconnect all at once.
            left = max(give_up_at - time.monotonic(), 0.0)
            self._ending.wait(min(between(0, backoff), left))
            backoff = min(2 * backoff, _LAST_BACKOFF)

    @contextmanager
    def _channel(self, role: str) -> Iterator[grpc.Channel]:
        channel = grpc.insecure_channel(self.target, options=client_options(self.settings, role))
        try:
            yield channel
        finally:
            channel.close()

    @contextmanager
    def _cut_if_silent(self, give_up_at: float) -> Iterator[float]:
        """Cancels the streams if they do not respond in time; yields how many seconds they have."""
        handshake_seconds = min(_HANDSHAKE_SECONDS, max(give_up_at - time.monotonic(), 0.1))
        timer = call_later(handshake_seconds, self._cut)
        try:
            yield handshake_seconds
        finally:
            timer.cancel()

    def _open(
        self, channel: grpc.Channel, hello: link_pb2.Hello, outgoing: Outbox | NativeStream, attempt: int
    ) -> Any:
        """Opens a stream, which starts with Hello."""
        hello.MergeFrom(self._hello(attempt))
        outgoing.put(frames.envelope(link_pb2.Frame(hello=hello)))
        # Frames are encoded already, so gRPC gets no serializers.
        open_stream: Any = channel.stream_stream(LINK_METHOD)
        call = open_stream(iter(outgoing))
        self._calls = (*(call for call in self._calls if call.is_active()), call)
        if self.ended is not None:
            call.cancel()  # the thread that ended the link could not know of this call
        return call

    def _hello(self, attempt: int) -> link_pb2.Hello:
        return link_pb2.Hello(
            protocol=self.PROTOCOL,
            peer=self.local.id,
            name=self.local.name,
            session=self._session_id,
            attempt=attempt,
            resume=self._was_welcomed,
            max_message_bytes=self.settings.max_message_bytes,
            max_bytes_in_flight=self.settings.max_bytes_in_flight,
            codecs=self.settings.codecs,
        )

    def _welcome(self, frame: link_pb2.Frame) -> link_pb2.SameHost | None:
        """Checks the worker's response to Hello. Returns the local socket that it offers, if any."""
        kind = frame.WhichOneof("kind")
        if kind == "goodbye":
            error = faults.rebuild(frame.goodbye.error)
            if isinstance(error, Unavailable):
                raise _Broken(str(error))  # the worker shuts down; another may take over its address
            raise error
        if kind != "welcome":
            raise ProtocolError(f"{self.target} responded to Hello with {kind}", worker=self.target)
        welcome = frame.welcome
        if welcome.protocol != self.PROTOCOL:
            raise ProtocolError(
                f"{self.target} speaks protocol {welcome.protocol}, this is {self.PROTOCOL}; "
                "use the same version of gradwire at both ends",
                worker=self.target,
            )
        peer = PeerIdentity(welcome.peer, welcome.name, self.target)
        if self._was_welcomed and (welcome.peer != self.peer.id or not welcome.resumed):
            happened = "was restarted" if welcome.peer != self.peer.id else "has dropped this client's lease"
            raise WorkerLost(
                f"{self.peer} {happened}: what it held for this process is gone", worker=str(self.peer)
            )
        self.peer = peer
        self.peer_max_message_bytes = welcome.max_message_bytes
        self.limit_bytes_in_flight(welcome.max_bytes_in_flight)
        self.peer_codecs = frozenset(welcome.codecs)
        self._was_welcomed = True
        return welcome.same_host if welcome.HasField("same_host") else None

    def _broken(self, error: grpc.RpcError, handshake_seconds: float) -> Exception:
        if error.code() == grpc.StatusCode.UNIMPLEMENTED and not self._was_welcomed:
            return ConnectFailed(
                f"the gRPC server at {self.target} is no gradwire worker", worker=self.target
            )
        return _Broken(_explain(error, handshake_seconds))

    def _unreachable_error(self, reason: str) -> GradwireError:
        if not self._was_welcomed:
            return ConnectFailed(
                f"no gradwire worker responded at {self.target}"
                + (f" within {self._connect_timeout:g} s" if self._wait_for_ready else "")
                + f": {reason}",
                worker=self.target,
            )
        return WorkerLost(
            f"{self.peer} has been out of reach for {self.settings.lost_after:g} s: {reason}",
            worker=str(self.peer),
        )


class GrpcLink(Session, _Connector):
    """A link over two gRPC streams, or over a local socket."""

    PROTOCOL = 1
    CHANNELS = ("control", "bulk")

    def __init__(self, target: str, local: PeerIdentity, handler: Handler, settings: LinkSettings) -> None:
        Session.__init__(self, local, PeerIdentity(0, target, ""), handler, settings)
        self._prepare(target)

    def close(self, *, leaving: bool = False) -> None:
        Session.close(self, leaving=leaving)
        self._join_supervisor()

    def abort(self, error: GradwireError) -> None:
        Session.abort(self, error)
        self._cut()

    def _new_streams(self) -> StreamPair:
        return StreamPair(self.settings, self.quota)

    def _run_session(
        self, channels: list[grpc.Channel], streams: StreamPair, attempt: int, give_up_at: float
    ) -> None:
        control, bulk = channels
        handshake_seconds = 0.0
        try:
            with self._cut_if_silent(give_up_at) as handshake_seconds:
                hello = link_pb2.Hello(role=link_pb2.Hello.ROLE_CONTROL, same_host=self.settings.same_host)
                control_call = self._open(control, hello, streams.control, attempt)
                offer = self._welcome(_first_frame(control_call))
            connection = None
            if offer is not None and self.settings.same_host:
                # Half of the time that is left: if the socket does not respond, the rest is for the network.
                connection = client_handshake(offer, self.target, (give_up_at - time.monotonic()) / 2)
            if connection is None:
                with self._cut_if_silent(give_up_at) as handshake_seconds:
                    hello = link_pb2.Hello(role=link_pb2.Hello.ROLE_BULK, same_host=self.settings.same_host)
                    bulk_call = self._open(bulk, hello, streams.bulk, attempt)
                    if _first_frame(bulk_call).WhichOneof("kind") != "welcome":
                        raise _Broken("the stream for bulk data was refused")
        except grpc.RpcError as error:
            raise self._broken(error, handshake_seconds) from error
        if connection is None:
            self._run_over_streams(control_call, bulk_call, streams, handshake_seconds)
        else:
            self._run_over_socket(control_call, connection, streams)

    def _run_over_socket(self, control_call: Any, connection: socket.socket, parent: Streams) -> None:
        local = LocalStreams(self.settings, self.quota, connection, parent)
        # The control stream notices a stopped worker, since the worker no longer responds to its pings.
        if not control_call.add_callback(partial(local.close, discard=True)):
            local.close(discard=True)
        self.attach(local)
        self._is_attached = True
        self._connected.set()
        try:
            local.run(self)
        except OSError as error:
            raise _Broken(f"the local socket cannot be read: {error}") from error
        finally:
            self._is_attached = False
        if self._ended is None:
            closed = "the worker closed the socket"
            raise _Broken(closed if control_call.is_active() else _explain(control_call, 0.0))

    def _run_over_streams(
        self, control_call: Any, bulk_call: Any, streams: Streams, handshake_seconds: float
    ) -> None:
        self._break_reason = ""
        over = threading.Event()
        readers = []
        self.attach(streams)
        self._is_attached = True
        for role, call in (("control", control_call), ("bulk", bulk_call)):
            name = f"gradwire-{role}-{self.target}"
            reader = threading.Thread(target=self._read, args=(call, streams), name=name, daemon=True)
            readers.append((call, reader))
            if not call.add_callback(over.set):
                over.set()
            reader.start()
        self._connected.set()
        try:
            over.wait()  # gRPC calls back whatever way a stream ends
            # The last frame of the ended stream may be a goodbye. Its reader handles
            # it at once, unless it is stuck.
            next(reader for call, reader in readers if not call.is_active()).join(_DRAIN_SECONDS)
        finally:
            self._is_attached = False
            self._cut()
            streams.close(discard=True)
        if self._ended is None:
            raise _Broken(self._break_reason or _explain(control_call, handshake_seconds))

    def _read(self, call: Any, streams: Streams) -> None:
        """Reads a stream to its end, on a thread of its own."""
        reason = "the worker closed the stream"
        try:
            for data in call:
                self.receive_or_refuse(data, streams)
        except grpc.RpcError as error:
            reason = _explain(error, 0.0)
        # One stream is of no use without the other: the supervising thread opens both anew.
        if self._ended is None and not streams.control.closed:
            self._break_reason = self._break_reason or reason
            self._cut()


class NativeGrpcLink(NativeSession, _Connector):
    """A link over one gRPC stream."""

    PROTOCOL = 2
    CHANNELS = ("link",)

    def __init__(self, target: str, local: PeerIdentity, handler: Handler, settings: LinkSettings) -> None:
        NativeSession.__init__(self, local, PeerIdentity(0, target, ""), handler, settings)
        self._prepare(target)

    def close(self, *, leaving: bool = False) -> None:
        NativeSession.close(self, leaving=leaving)
        self._join_supervisor()

    def abort(self, error: GradwireError) -> None:
        NativeSession.abort(self, error)
        self._cut()

    def _new_streams(self) -> NativeStream:
        return NativeStream(self)

    def _run_session(
        self, channels: list[grpc.Channel], stream: NativeStream, attempt: int, give_up_at: float
    ) -> None:
        handshake_seconds = 0.0
        try:
            with self._cut_if_silent(give_up_at) as handshake_seconds:
                call = self._open(
                    channels[0], link_pb2.Hello(role=link_pb2.Hello.ROLE_CONTROL), stream, attempt
                )
                self._welcome(_first_frame(call))
        except grpc.RpcError as error:
            raise self._broken(error, handshake_seconds) from error
        self._break_reason = ""
        over = threading.Event()
        reader = threading.Thread(
            target=self._read, args=(call, stream), name=f"gradwire-read-{self.target}", daemon=True
        )
        self.attach(stream)
        self._is_attached = True
        if not call.add_callback(over.set):
            over.set()
        reader.start()
        self._connected.set()
        try:
            over.wait()  # gRPC calls back whatever way the stream ends
            # The last frame may be a goodbye. The reader handles it at once, unless it is stuck.
            reader.join(_DRAIN_SECONDS)
        finally:
            self._is_attached = False
            self._cut()
        if self._ended is None:
            raise _Broken(self._break_reason or _explain(call, handshake_seconds))

    def _read(self, call: Any, stream: NativeStream) -> None:
        """Reads the stream to its end, on a thread of its own."""
        reason = "the worker closed the stream"
        try:
            for data in call:
                self.receive_or_refuse(data, stream)
        except grpc.RpcError as error:
            reason = _explain(error, 0.0)
        if self._ended is None and not stream.closed:
            self._break_reason = self._break_reason or reason
            self._cut()


def new_grpc_link(
    target: str, local: PeerIdentity, handler: Handler, settings: LinkSettings
) -> GrpcLink | NativeGrpcLink:
    """A link of the kind that the settings ask for."""
    for kind in (GrpcLink, NativeGrpcLink):
        if settings.protocol == kind.PROTOCOL:
            return kind(target, local, handler, settings)
    raise ValueError(f"protocol {settings.protocol} is not spoken here, only {PROTOCOLS}")


def _first_frame(call: Any) -> link_pb2.Frame:
    try:
        received = frames.parse(next(call))
    except StopIteration:
        raise _Broken("the worker closed the stream at once") from None
    if len(received) != 1:
        raise ProtocolError("the worker's first message is not a single frame")
    return received[0]


def _explain(error: grpc.RpcError, handshake_seconds: float) -> str:
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.CANCELLED:
        return f"there was no response for {handshake_seconds:.1f} s"
    return f"{code.name}: {details}"
