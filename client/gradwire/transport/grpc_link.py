"""The connecting end of a link.

A supervising thread opens a gRPC stream, and opens a new one after a cut, until the worker has been
unreachable for too long or was restarted. It never runs user code: a request that another thread received may
wait for this very link, which this thread has to connect again.

The session goes over a socket instead if the worker offers one that can be reached: a unix socket if both
processes are on one host, else a direct TCP socket. The stream stays open meanwhile: its pings tell when the
worker has stopped.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
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
from gradwire.transport import direct, faults, frames, grpc_messages, same_host
from gradwire.transport.base import Handler, LinkSettings, PeerIdentity
from gradwire.transport.carriers import GrpcStream, SocketCarrier
from gradwire.transport.channels import LINK_METHOD, client_options, silence_before_cut
from gradwire.transport.session import Session

__all__ = ["PROTOCOL", "GrpcLink"]

log = logging.getLogger("gradwire.link")

PROTOCOL = 2
"""The version of the protocol that this code speaks."""

_FIRST_BACKOFF, _LAST_BACKOFF = 0.05, 1.0
_HANDSHAKE_SECONDS = 5.0
_GOODBYE_SECONDS = 2.0
_DRAIN_SECONDS = 0.5
_AVOID_DIRECT_SECONDS = 60.0
"""How long a direct socket is not tried again after it could not be had, or was cut while gRPC was not."""
_AVOID_SAME_HOST_SECONDS = 60.0
"""How long no unix socket is used after there was no descriptor left for shared memory."""


class _Broken(Exception):
    """The connection was cut, or could not be had; connecting may be tried again."""


class GrpcLink(Session):
    """A session with a worker that listens. Call `connect` before anything else."""

    def __init__(self, target: str, local: PeerIdentity, handler: Handler, settings: LinkSettings) -> None:
        super().__init__(local, PeerIdentity(0, target, ""), handler, settings)
        self.target = target
        self._session_id = new_id()
        self._connect_timeout = settings.connect_timeout
        self._wait_for_ready = settings.wait_for_ready
        """Whether connecting is tried again until the timeout."""
        self._was_welcomed = False
        self._call: Any = None
        """The gRPC call of the stream that is open or being opened."""
        self._is_attached = False
        """Whether the session is attached to the stream, or to a socket."""
        self._break_reason = ""
        """Why the stream or the socket broke; empty while both are open."""
        self._avoids_direct_until = 0.0
        self._avoids_same_host_until = 0.0
        self._connected = threading.Event()
        self._ending = threading.Event()
        self._goodbye_timer: Timer | None = None
        self._supervisor = threading.Thread(
            target=self._supervise, name=f"gradwire-link-{target}", daemon=True
        )

    def close(self, *, leaving: bool = False) -> None:
        super().close(leaving=leaving)
        self._join_supervisor()

    def abort(self, error: GradwireError) -> None:
        super().abort(error)
        self._cut()

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._call = None

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
        if self._call is not None:
            self._call.cancel()

    def _join_supervisor(self) -> None:
        if self._supervisor.is_alive() and threading.current_thread() is not self._supervisor:
            self._supervisor.join(2 * _GOODBYE_SECONDS)

    # -- the supervising thread

    def _supervise(self) -> None:
        try:
            with grpc.insecure_channel(self.target, options=client_options(self.settings)) as channel:
                self._reconnect_until_ended(channel)
        except Exception as error:
            log.exception("the link to %s failed", self.peer)
            self.abort(InternalError(f"the link to {self.peer} failed: {error!r}"))
        finally:
            if self._goodbye_timer is not None:
                self._goodbye_timer.cancel()

    def _reconnect_until_ended(self, channel: grpc.Channel) -> None:
        give_up_at = time.monotonic() + self._connect_timeout
        backoff, attempt = _FIRST_BACKOFF, 0
        while self.ended is None:
            attempt += 1
            stream = GrpcStream(self)
            reason = ""
            try:
                self._run_session(channel, stream, attempt, give_up_at)
            except _Broken as broken:
                reason = str(broken)
            except GradwireError as error:
                self.abort(error)
            finally:
                self._cut()
                stream.close()
            if self.detach(stream):
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
    def _cut_if_silent(self, give_up_at: float) -> Iterator[float]:
        """Cancels the stream if it does not respond in time; yields how many seconds it has."""
        handshake_seconds = min(_HANDSHAKE_SECONDS, max(give_up_at - time.monotonic(), 0.1))
        timer = call_later(handshake_seconds, self._cut)
        try:
            yield handshake_seconds
        finally:
            timer.cancel()

    def _open(self, channel: grpc.Channel, stream: GrpcStream, attempt: int) -> Any:
        """Opens a stream, which starts with Hello."""
        hello = frames.envelope(link_pb2.Frame(hello=self._hello(attempt)))
        # Frames are encoded already, so gRPC gets no serializers.
        open_stream: Any = channel.stream_stream(LINK_METHOD)
        self._call = call = open_stream(chain([hello], stream))
        if self.ended is not None:
            call.cancel()  # the thread that ended the link could not know of this call
        return call

    def _hello(self, attempt: int) -> link_pb2.Hello:
        return link_pb2.Hello(
            protocol=PROTOCOL,
            peer=self.local.id,
            name=self.local.name,
            session=self._session_id,
            attempt=attempt,
            resume=self._was_welcomed,
            max_message_bytes=self.settings.max_message_bytes,
            max_bytes_in_flight=self.settings.max_bytes_in_flight,
            codecs=self.settings.codecs,
            same_host=self.settings.same_host and time.monotonic() >= self._avoids_same_host_until,
            direct=self.settings.direct and time.monotonic() >= self._avoids_direct_until,
        )

    def _welcome(self, frame: link_pb2.Frame) -> link_pb2.Welcome:
        """Checks the worker's response to Hello."""
        kind = frame.WhichOneof("kind")
        if kind == "goodbye":
            error = faults.rebuild(frame.goodbye.error)
            if isinstance(error, Unavailable):
                raise _Broken(str(error))  # the worker shuts down; another may take over its address
            raise error
        if kind != "welcome":
            raise ProtocolError(f"{self.target} responded to Hello with {kind}", worker=self.target)
        welcome = frame.welcome
        if welcome.protocol != PROTOCOL:
            raise ProtocolError(
                f"{self.target} speaks protocol {welcome.protocol}, this is {PROTOCOL}; "
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
        return welcome

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

    # -- the session

    def _run_session(
        self, channel: grpc.Channel, stream: GrpcStream, attempt: int, give_up_at: float
    ) -> None:
        """Opens a stream, and runs the session over it, or over a socket that it leads to, until it ends."""
        handshake_seconds = 0.0
        try:
            with self._cut_if_silent(give_up_at) as handshake_seconds:
                call = self._open(channel, stream, attempt)
                welcome = self._welcome(_first_frame(call))
        except grpc.RpcError as error:
            raise self._broken(error, handshake_seconds) from error
        over = threading.Event()
        connection = self._connect_socket(welcome, give_up_at)
        carrier: GrpcStream | SocketCarrier = stream
        if connection is not None:
            carrier = SocketCarrier(connection, partial(self._on_socket_cut, over), parent=stream)
        elif welcome.HasField("same_host") or welcome.HasField("direct"):
            stream.opening = frames.NOTHING  # "the session goes over this stream"
        self._break_reason = ""
        # gRPC calls back whatever way the stream ends. It ends, too, when the worker has stopped: its pings
        # are not responded to.
        if not call.add_callback(over.set):
            over.set()
        # Before that is so: if the link is closed from then on, the goodbye is still to be written.
        self._is_attached = True
        try:
            try:
                self.attach(carrier)
            except OSError as error:
                raise _Broken(f"the session cannot go over the connection: {error}") from error
            reader = None
            if carrier is stream:
                reader = stream.read(call, grpc_messages.of_client(call), f"gradwire-read-{self.target}")
            self.handle_events(most_requests=0)
            self._connected.set()
            over.wait()
            if reader is not None:
                reader.join(_DRAIN_SECONDS)
            if self._native.heard_goodbye:  # it is handled at once, unless a thread is stuck
                self._ending.wait(_DRAIN_SECONDS)
        finally:
            self._is_attached = False
            self._cut()
        if self._ended is None:
            raise _Broken(self._break_reason or _explain(call, handshake_seconds))

    def _connect_socket(self, welcome: link_pb2.Welcome, give_up_at: float) -> socket.socket | None:
        """The socket that goes around gRPC, if there is one."""
        connection = None

        def seconds() -> float:
            # Half of the time that is left: if the socket does not respond, the rest is for gRPC.
            return (give_up_at - time.monotonic()) / 2

        if welcome.HasField("same_host"):
            connection = same_host.connect(welcome.same_host, self.target, seconds())
        if connection is None and welcome.HasField("direct"):
            connection = direct.connect(welcome.direct, self.target, seconds(), self.settings)
            if connection is None:
                self._avoid_direct()
        return connection

    def _avoid_direct(self) -> None:
        """The direct socket cannot be had, or was cut: the next connections go over gRPC for a while."""
        self._avoids_direct_until = time.monotonic() + _AVOID_DIRECT_SECONDS

    def _on_socket_cut(self, over: threading.Event, carrier: SocketCarrier, reason: str) -> None:
        if not carrier.is_local and self._call is not None and self._call.is_active():
            self._avoid_direct()  # gRPC still reaches the worker
        if carrier.lacked_descriptors:  # it would be cut again and again
            self._avoids_same_host_until = time.monotonic() + _AVOID_SAME_HOST_SECONDS
        self._break_reason = reason
        over.set()


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
