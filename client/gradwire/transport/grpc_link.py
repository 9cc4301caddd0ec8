"""The connecting end of a link.

A supervising thread opens a gRPC stream, and opens a new one after a cut, until the worker has been
unreachable for too long or was restarted. It never runs user code: a request that another thread received may
wait for this very link, which this thread has to connect again.

The session goes over a socket instead if the worker offers one that can be reached: a unix socket if both
processes are on one host, else a direct TCP socket. The stream stays open meanwhile: its pings tell when the
worker has stopped.

With TLS that thread looks every second whether certificates were replaced. If so, it opens another stream,
with the new ones, and the session moves there before the old stream ends: no request has to wait for a cut.
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
from gradwire.system.certificates import Certificates, WatchedCertificates
from gradwire.system.randomness import between, new_id
from gradwire.system.timers import Timer, call_later
from gradwire.transport import direct, faults, frames, grpc_messages, same_host
from gradwire.transport.base import Handler, LinkSettings
from gradwire.transport.carriers import GrpcStream, SocketCarrier
from gradwire.transport.channels import LINK_METHOD, open_channel, silence_before_cut
from gradwire.transport.identity import KnownWorkers, OwnIdentity, PeerIdentity
from gradwire.transport.session import Session
from gradwire.transport.tls import certificates_of, explain

__all__ = ["PROTOCOL", "GrpcLink"]

log = logging.getLogger("gradwire.link")

PROTOCOL = 3
"""The version of the protocol that this code speaks."""

_FIRST_BACKOFF, _LAST_BACKOFF = 0.05, 1.0
_HANDSHAKE_SECONDS = 5.0
_GOODBYE_SECONDS = 2.0
_DRAIN_SECONDS = 0.5
_AVOID_DIRECT_SECONDS = 60.0
"""How long a direct socket is not tried again after it could not be had, or was cut while gRPC was not."""
_AVOID_SAME_HOST_SECONDS = 60.0
"""How long no unix socket is used after there was no descriptor left for shared memory."""
_LOOK_SECONDS = 1.0
"""How often to look whether certificates were replaced."""
_MOVE_AGAIN_SECONDS = 30.0
"""How long to stay with the old certificates after the worker has not taken the new ones."""


class _Broken(Exception):
    """The connection was cut, or could not be had; connecting may be tried again."""


class _Connection:
    """A stream, and what belongs to it."""

    def __init__(self, session: GrpcLink, channel: grpc.Channel) -> None:
        self.channel = channel
        self.stream = GrpcStream(session)
        self._call: Any = None
        """The gRPC call of the stream."""
        self._reader: threading.Thread | None = None
        self.over = threading.Event()
        """Set when the stream or the socket has ended."""
        self.break_reason = ""
        """Why the socket broke; empty while it is open."""
        self.handshake_seconds = 0.0

    def open(self, hello: bytes) -> None:
        # Frames are encoded already, so gRPC gets no serializers.
        open_stream: Any = self.channel.stream_stream(LINK_METHOD)
        self._call = open_stream(chain([hello], self.stream))

    def first_frame(self) -> link_pb2.Frame:
        """What the worker responds with."""
        return _first_frame(self._call)

    def notice_end(self) -> None:
        """From now on `over` is set when the stream ends.

        gRPC calls back whatever way it ends. It ends, too, when the worker has stopped: its pings are not
        responded to.
        """
        if not self._call.add_callback(self.over.set):
            self.over.set()

    def read(self, thread_name: str) -> None:
        """Has what the worker sends over the stream read."""
        self._reader = self.stream.read(self._call, grpc_messages.of_client(self._call), thread_name)

    def drain(self) -> None:
        """Waits a moment until what had arrived before the end is read."""
        if self._reader is not None:
            self._reader.join(_DRAIN_SECONDS)

    def is_active(self) -> bool:
        """Whether the stream is open."""
        return bool(self._call.is_active())

    def why_over(self) -> str:
        """Why it has ended, once it has."""
        return self.break_reason or _explain(self._call, self.handshake_seconds)

    def cut(self) -> None:
        if self._call is not None:
            self._call.cancel()


class GrpcLink(Session):
    """A session with a worker that listens. Call `connect` before anything else."""

    def __init__(
        self,
        target: str,
        local: OwnIdentity,
        handler: Handler,
        settings: LinkSettings,
        known_workers: KnownWorkers | None = None,
    ) -> None:
        super().__init__(local, PeerIdentity(0, target, ""), handler, settings)
        self.target = target
        self._secret = local.secret
        self._known_workers = known_workers or KnownWorkers()
        self._session_id = new_id()
        self._connect_timeout = settings.connect_timeout
        self._wait_for_ready = settings.wait_for_ready
        """Whether connecting is tried again until the timeout."""
        self._was_welcomed = False
        self._watched: WatchedCertificates | None = None
        """The certificates, which follow their files; None without TLS."""
        if settings.tls is not None:
            self._watched = certificates_of(settings.tls)
        self._certificates: Certificates | None = None
        """Those of the latest channel."""
        self._channel: grpc.Channel | None = None
        self._was_probed = False
        """Whether this link has found out already that the worker speaks no TLS."""
        self._attempt = 0
        self._give_up_at = 0.0
        """When a worker that does not respond counts as lost."""
        self._connection: _Connection | None = None
        """The connection that is open or being opened."""
        self._left: _Connection | None = None
        """The connection that the session moves away from."""
        self._is_attached = False
        """Whether the session is attached to the stream, or to a socket."""
        self._goes_direct = settings.direct and settings.tls is None
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
        self._connection = self._left = None

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
        for connection in (self._connection, self._left):
            if connection is not None:
                connection.cut()

    def _join_supervisor(self) -> None:
        if self._supervisor.is_alive() and threading.current_thread() is not self._supervisor:
            self._supervisor.join(2 * _GOODBYE_SECONDS)

    # -- the supervising thread

    def _supervise(self) -> None:
        try:
            self._reconnect_until_ended()
        except Exception as error:
            log.exception("the link to %s failed", self.peer)
            self.abort(InternalError(f"the link to {self.peer} failed: {error!r}"))
        finally:
            if self._channel is not None:
                self._channel.close()
            if self._goodbye_timer is not None:
                self._goodbye_timer.cancel()

    def _reconnect_until_ended(self) -> None:
        self._give_up_at = time.monotonic() + self._connect_timeout
        backoff = _FIRST_BACKOFF
        while self.ended is None:
            self._connection = _Connection(self, self._latest_channel())
            reason = ""
            try:
                self._open_session(self._connection, self._give_up_at)
                self._run_session()
            except _Broken as broken:
                reason = str(broken)
            except GradwireError as error:
                self.abort(error)
            finally:
                self._is_attached = False
                self._cut()
                self._connection.stream.close()
            if self.detach(self._connection.stream):
                log.info("the connection to %s was cut: %s", self.peer, reason)
                self._give_up_at = time.monotonic() + self.settings.lost_after
                if "ping timeout" in reason or "keepalive watchdog" in reason:  # gRPC has no code for this
                    self._give_up_at -= silence_before_cut(self.settings)
                backoff = _FIRST_BACKOFF
            is_only_try = not self._was_welcomed and not self._wait_for_ready
            if self.ended is None and (is_only_try or time.monotonic() >= self._give_up_at):
                self.ended_by_timeout = self._was_welcomed
                self.abort(self._unreachable_error(reason))
            # Full jitter: many clients of one worker must not reconnect all at once.
            left = max(self._give_up_at - time.monotonic(), 0.0)
            self._ending.wait(min(between(0, backoff), left))
            backoff = min(2 * backoff, _LAST_BACKOFF)

    def _latest_channel(self) -> grpc.Channel:
        """The channel with the latest certificates; the one before is closed."""
        certificates = self._watched.latest() if self._watched is not None else None
        if self._channel is None or certificates is not self._certificates:
            previous, self._channel = self._channel, open_channel(self.target, self.settings, certificates)
            self._certificates = certificates
            if previous is not None:
                previous.close()
        return self._channel

    @contextmanager
    def _cut_if_silent(self, connection: _Connection, give_up_at: float) -> Iterator[None]:
        """Cancels the stream if it does not respond in time."""
        connection.handshake_seconds = min(_HANDSHAKE_SECONDS, max(give_up_at - time.monotonic(), 0.1))
        timer = call_later(connection.handshake_seconds, connection.cut)
        try:
            yield
        finally:
            timer.cancel()

    def _open(self, connection: _Connection) -> None:
        """Opens a stream, which starts with Hello."""
        self._attempt += 1
        connection.open(frames.envelope(link_pb2.Frame(hello=self._hello(self._attempt))))
        if self.ended is not None:
            connection.cut()  # the thread that ended the link could not know of this call

    def _hello(self, attempt: int) -> link_pb2.Hello:
        return link_pb2.Hello(
            protocol=PROTOCOL,
            peer=self.local.id,
            secret=self._secret,
            name=self.local.name,
            session=self._session_id,
            attempt=attempt,
            resume=self._was_welcomed,
            max_message_bytes=self.settings.max_message_bytes,
            max_bytes_in_flight=self.settings.max_bytes_in_flight,
            codecs=self.settings.codecs,
            same_host=self.settings.same_host and time.monotonic() >= self._avoids_same_host_until,
            direct=self._goes_direct and time.monotonic() >= self._avoids_direct_until,
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
        self._known_workers.check(peer, welcome.proof)
        self.peer = peer
        self.peer_max_message_bytes = welcome.max_message_bytes
        self.limit_bytes_in_flight(welcome.max_bytes_in_flight)
        self.peer_codecs = frozenset(welcome.codecs)
        self._was_welcomed = True
        return welcome

    def _broken(self, error: grpc.RpcError, connection: _Connection, give_up_at: float) -> Exception:
        if not self._was_welcomed:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return ConnectFailed(
                    f"the gRPC server at {self.target} is no gradwire worker", worker=self.target
                )
            refusal = self._tls_refusal(error, give_up_at)
            if refusal:
                message = f"cannot connect to the worker at {self.target}: {refusal}"
                return ConnectFailed(message, worker=self.target, retryable=False)
        return _Broken(_explain(error, connection.handshake_seconds))

    def _tls_refusal(self, error: grpc.RpcError, give_up_at: float) -> str | None:
        """Why the worker will never take a connection, if that has to do with TLS."""
        details = error.details() or ""
        if error.code() != grpc.StatusCode.UNAVAILABLE or "Failed to connect to remote host" in details:
            return None  # nobody listens, or nobody responds
        if self.settings.tls is None and self._was_probed:
            return None
        self._was_probed = True
        seconds = give_up_at - time.monotonic()
        refusal = explain(self.target, self.settings.tls, self._certificates, seconds)
        return refusal or (details if "CERTIFICATE_VERIFY_FAILED" in details else None)

    def _unreachable_error(self, reason: str) -> GradwireError:
        if not self._was_welcomed:
            return ConnectFailed(
                f"no gradwire worker responded at {self.target}"
                + (f" within {self._connect_timeout:g} s" if self._wait_for_ready else "")
                + f": {reason}",
                worker=self.target,
            )
        if self._watched is not None:
            reason = explain(self.target, self.settings.tls, self._certificates, 0.0) or reason
        return WorkerLost(
            f"{self.peer} has been out of reach for {self.settings.lost_after:g} s: {reason}",
            worker=str(self.peer),
        )

    # -- the session

    def _open_session(self, connection: _Connection, give_up_at: float) -> None:
        """Opens a stream, and has the session go over it, or over a socket that it leads to."""
        try:
            with self._cut_if_silent(connection, give_up_at):
                self._open(connection)
                welcome = self._welcome(connection.first_frame())
        except grpc.RpcError as error:
            raise self._broken(error, connection, give_up_at) from error
        found = self._connect_socket(welcome, give_up_at)
        stream = connection.stream
        carrier: GrpcStream | SocketCarrier = stream
        if found is not None:
            carrier = SocketCarrier(found, partial(self._on_socket_cut, connection), parent=stream)
        elif welcome.HasField("same_host") or welcome.HasField("direct"):
            stream.opening = frames.NOTHING  # "the session goes over this stream"
        connection.notice_end()
        # Before that is so: if the link is closed from then on, the goodbye is still to be written.
        self._is_attached = True
        try:
            self.attach(carrier)
        except OSError as error:
            raise _Broken(f"the session cannot go over the connection: {error}") from error
        if carrier is stream:
            connection.read(f"gradwire-read-{self.target}")
        self.handle_events(most_requests=0)
        self._connected.set()

    def _run_session(self) -> None:
        """Waits until the connection ends. Moves the session to another one when certificates were
        replaced."""
        connection = self._connection
        assert connection is not None
        refused: Certificates | None = None
        move_at = 0.0
        while not connection.over.wait(None if self._watched is None else _LOOK_SECONDS):
            assert self._watched is not None
            newest = self._watched.latest()
            if newest is self._certificates or (newest is refused and time.monotonic() < move_at):
                continue
            moved = self._move(connection, newest, is_first_try=newest is not refused)
            if moved is None:
                refused, move_at = newest, time.monotonic() + _MOVE_AGAIN_SECONDS
            else:
                connection = moved
        connection.drain()
        if self._native.heard_goodbye:  # it is handled at once, unless a thread is stuck
            self._ending.wait(_DRAIN_SECONDS)
        connection.cut()
        if self._ended is None:
            raise _Broken(connection.why_over())

    def _connect_socket(self, welcome: link_pb2.Welcome, give_up_at: float) -> socket.socket | None:
        """The socket that goes around gRPC, if there is one."""
        connection = None

        def seconds() -> float:
            # Half of the time that is left: if the socket does not respond, the rest is for gRPC.
            return (give_up_at - time.monotonic()) / 2

        if self.settings.same_host and welcome.HasField("same_host"):
            connection = same_host.connect(welcome.same_host, self.target, seconds())
        if connection is None and self._goes_direct and welcome.HasField("direct"):
            connection = direct.connect(welcome.direct, self.target, seconds(), self.settings)
            if connection is None:
                self._avoid_direct()
        return connection

    def _avoid_direct(self) -> None:
        """The direct socket cannot be had, or was cut: the next connections go over gRPC for a while."""
        self._avoids_direct_until = time.monotonic() + _AVOID_DIRECT_SECONDS

    def _on_socket_cut(self, connection: _Connection, carrier: SocketCarrier, reason: str) -> None:
        if not carrier.is_local and connection.is_active():
            self._avoid_direct()  # gRPC still reaches the worker
        if carrier.lacked_descriptors:  # it would be cut again and again
            self._avoids_same_host_until = time.monotonic() + _AVOID_SAME_HOST_SECONDS
        connection.break_reason = reason
        connection.over.set()

    def _move(self, leaving: _Connection, newest: Certificates, *, is_first_try: bool) -> _Connection | None:
        """Moves the session to a connection with new certificates, and ends the one that it leaves. If that
        cannot be had, the session stays where it is, and the result is None."""
        channel = open_channel(self.target, self.settings, newest)
        connection = _Connection(self, channel)
        self._connection, self._left = connection, leaving
        self._give_up_at = time.monotonic() + self.settings.lost_after
        self._is_moving = True
        reason = ""
        try:
            self._open_session(connection, time.monotonic() + _HANDSHAKE_SECONDS)
        except _Broken as broken:
            reason = str(broken)
        finally:
            self._is_moving = False
            self._left = None
            has_moved = self._carried_by(connection.stream)
            if has_moved:
                self._channel, self._certificates = channel, newest
            else:
                self._connection = leaving
            abandoned = leaving if has_moved else connection
            abandoned.cut()
            abandoned.stream.close()
            abandoned.channel.close()
        if has_moved:
            log.info("the link to %s uses the new certificates", self.peer)
            return connection
        if is_first_try and self.ended is None:
            log.warning(
                "no connection to %s with the new certificates, that with the old ones stays in use: %s",
                self.peer,
                explain(self.target, self.settings.tls, newest, 0.0) or reason,
            )
        return None

    def _carried_by(self, stream: GrpcStream) -> bool:
        """Whether the session goes over that stream, or over a socket that it led to."""
        used = self._carrier
        return used is stream or (isinstance(used, SocketCarrier) and used.parent is stream)


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
