"""The accepting end of links: finds the session that a stream belongs to, and keeps its lease."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from gradwire.errors import GradwireError, PermissionDenied, ProtocolError, Unavailable, WorkerLost
from gradwire.proto.v1 import link_pb2
from gradwire.system.timers import Timer, call_later
from gradwire.transport import (
    PROTOCOL,
    Budget,
    GrpcStream,
    Handler,
    Link,
    LinkSettings,
    OwnIdentity,
    PeerIdentity,
    Session,
    SocketCarrier,
    SocketListener,
    direct,
    faults,
    frames,
    grpc_messages,
    handshake,
    is_secret_of,
    same_host,
)

__all__ = ["SessionAcceptor"]

log = logging.getLogger("gradwire.server.links")

_AVOID_SAME_HOST_SECONDS = 60.0
"""How long no unix socket is offered after there was no descriptor left for shared memory."""

_OFFERS = {"same_host": same_host.offer, "direct": direct.offer}


@dataclass(slots=True, eq=False)
class _Accepted:
    key: tuple[int, int]
    session: Session
    stream: GrpcStream
    """The stream of the latest attempt."""
    attempt: int
    is_attached: bool = False
    """Whether the session is attached to the stream, or to a socket that it led to: not until the client has
    chosen."""
    lease: Timer | None = None
    """The timer of the lease; runs while the client is disconnected."""

    @property
    def is_choosing(self) -> bool:
        """Whether the client is connected, and has yet to choose between the stream and a socket."""
        return not self.is_attached and self.lease is None


class SessionAcceptor:
    """All sessions that clients have opened with this worker.

    Its lock is taken before a session's lock, never while one is held.
    """

    def __init__(
        self,
        identity: OwnIdentity,
        handler: Handler,
        settings: LinkSettings,
        on_open: Callable[[Link], None] = lambda _: None,
        budget: Budget | None = None,
    ) -> None:
        self._budget = budget or Budget(1 << 62)
        self.direct_address: str | None = None
        """Where to listen for direct sockets, as HOST:PORT; None: nowhere."""
        self._identity = identity
        self._handler = handler
        self._on_open = on_open
        self._settings = settings
        self._lock = threading.Lock()
        self._accepted: dict[tuple[int, int], _Accepted] = {}
        self._closed = False
        self._listeners: dict[str, SocketListener | None] = {}
        """Each opened for the first client that could use it; None if that failed."""
        self._avoids_same_host_until = 0.0

    @property
    def sessions(self) -> list[Session]:
        with self._lock:
            return [accepted.session for accepted in self._accepted.values()]

    def wait_until_delivered(self, timeout: float) -> bool:
        """Waits for the requesters to acknowledge all large responses. Returns whether they did in time."""
        give_up_at = time.monotonic() + timeout
        return all(
            session.wait_until_delivered(max(give_up_at - time.monotonic(), 0.0)) for session in self.sessions
        )

    def close(self) -> None:
        """Says goodbye to every client, and accepts no new ones."""
        with self._lock:
            self._closed = True
            all_accepted = list(self._accepted.values())
        for accepted in all_accepted:
            if accepted.lease is not None:
                accepted.lease.cancel()
            accepted.session.close(leaving=True)
        for listener in self._listeners.values():  # no other is opened from now on: new clients are refused
            if listener is not None:
                listener.close()

    def serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The gRPC method Link: yields the data to write, while others read."""
        silence = call_later(self._settings.hello_timeout, context.cancel)
        try:
            hello = _read_hello(requests)
            listeners = self._listeners_for(hello)
            accepted, resumed = self._join(hello, context.peer(), has_choice=bool(listeners))
        except GradwireError as error:
            log.warning("refused a stream from %s: %s", context.peer(), error)
            yield frames.goodbye(faults.describe(error, self._identity.name))
            return
        except grpc.RpcError:
            return  # the stream ended, or was silent for too long
        finally:
            silence.cancel()
        if accepted is None:
            yield self._welcome(hello, resumed=False)
            return
        stream = accepted.stream
        # gRPC calls back whatever way the stream ends; this generator, which waits for data to write, would
        # not notice.
        if not context.add_callback(partial(self._leave, accepted, stream)):
            self._leave(accepted, stream)
            return
        stream.read(
            requests,
            grpc_messages.of_server(context),
            f"gradwire-read-{accepted.session.peer.name}",
            partial(self._on_first_message, accepted, stream),
        )
        tokens = {kind: listener.new_token((accepted, stream)) for kind, listener in listeners.items()}
        offers: dict[str, Any] = {
            kind: _OFFERS[kind](listener, tokens[kind], context.peer())
            for kind, listener in listeners.items()
        }
        try:
            yield self._welcome(hello, resumed=resumed, **offers)
            yield from stream
        finally:
            for kind, listener in listeners.items():
                listener.forget(tokens[kind])

    def listen_directly(self) -> bool:
        """Listens for direct sockets now, not when the first client wants one. Returns whether that
        succeeded."""
        return bool(self._listeners_for(link_pb2.Hello(direct=True)))

    def _listeners_for(self, hello: link_pb2.Hello) -> dict[str, SocketListener]:
        """Those whose sockets a client may be offered, by the name of the offer in Welcome."""
        wanted: dict[str, Callable[[], SocketListener | None]] = {}
        avoids_same_host = time.monotonic() < self._avoids_same_host_until
        if hello.same_host and self._settings.same_host and not avoids_same_host:
            wanted["same_host"] = lambda: same_host.listen(self._on_handshake)
        if hello.direct and self._settings.direct and self.direct_address is not None:
            address = self.direct_address
            wanted["direct"] = lambda: direct.listen(address, self._on_handshake)
        with self._lock:
            for kind, listen in wanted.items():
                if kind not in self._listeners and not self._closed:
                    self._listeners[kind] = listen()
            found = {kind: self._listeners.get(kind) for kind in wanted}
        return {kind: listener for kind, listener in found.items() if listener is not None}

    def _on_handshake(self, purpose: object, connection: socket.socket) -> None:
        """Attaches the session of a client to the socket that it was offered."""
        assert isinstance(purpose, tuple)
        accepted, parent = purpose
        if connection.family != socket.AF_UNIX:
            direct.prepare(connection, self._settings)
        carrier = SocketCarrier(connection, partial(self._on_cut, accepted), is_accepted=True, parent=parent)
        with self._lock:
            if accepted.stream is not parent or not accepted.is_choosing or self._closed:
                raise ConnectionAbortedError("the client has reconnected, or uses the stream")
            # Before the session writes to it.
            handshake.accept(connection)
            accepted.session.attach(carrier)
            accepted.is_attached = True
        accepted.session.handle_events(most_requests=0)

    def _join(
        self, hello: link_pb2.Hello, address: str, *, has_choice: bool
    ) -> tuple[_Accepted | None, bool]:
        """The session that a stream belongs to, and whether it existed before.

        Nothing is written before the client has chosen: frames for a stream it never reads would be lost, and
        held in memory while the stream is open.
        """
        key = (hello.peer, hello.session)
        with self._lock:
            if self._closed:
                raise Unavailable(f"{self._identity.name} is shutting down", worker=self._identity.name)
            accepted = self._accepted.get(key)
            if accepted is None and hello.resume:
                return None, False  # the session is gone, and the client only needs to be told
            if accepted is not None and accepted.attempt >= hello.attempt:
                raise ProtocolError("a stream of an attempt that has been superseded")
            resumed = accepted is not None
            if accepted is None:
                accepted = self._accepted[key] = self._accept(key, hello, address)
            else:
                if accepted.lease is not None:
                    accepted.lease.cancel()
                accepted.session.detach(accepted.stream)
                accepted.stream = GrpcStream(accepted.session)
                accepted.attempt, accepted.is_attached, accepted.lease = hello.attempt, False, None
            if not has_choice:
                self._attach_stream(accepted)
        accepted.session.handle_events(most_requests=0)
        if not resumed:
            accepted.session.when_ended(lambda _: self._forget(accepted))
            self._on_open(accepted.session)
            log.info("%s connected from %s", accepted.session.peer, address)
        return accepted, resumed

    def _on_first_message(self, accepted: _Accepted, stream: GrpcStream) -> None:
        """The client has chosen the stream."""
        if accepted.is_choosing:
            with self._lock:
                if accepted.is_choosing and accepted.stream is stream:
                    self._attach_stream(accepted)

    def _attach_stream(self, accepted: _Accepted) -> None:
        """The lock is held, so that of two attempts the later one is attached last."""
        try:
            accepted.session.attach(accepted.stream)
        except OSError as error:
            log.warning("the stream of %s cannot be read: %s", accepted.session.peer, error)
            accepted.stream.close()  # the client opens another one
        else:
            accepted.is_attached = True

    def _accept(self, key: tuple[int, int], hello: link_pb2.Hello, address: str) -> _Accepted:
        peer = PeerIdentity(hello.peer, _printable(hello.name) or address)
        session = Session(self._identity, peer, self._handler, self._settings, self._budget)
        session.peer_max_message_bytes = hello.max_message_bytes or (1 << 62)
        session.limit_bytes_in_flight(hello.max_bytes_in_flight)
        session.peer_codecs = frozenset(hello.codecs)
        return _Accepted(key, session, GrpcStream(session), hello.attempt)

    def _welcome(self, hello: link_pb2.Hello, *, resumed: bool, **offers: Any) -> bytes:
        welcome = link_pb2.Welcome(
            protocol=PROTOCOL,
            peer=self._identity.id,
            name=self._identity.name,
            resumed=resumed,
            lease_seconds=self._settings.lease,
            max_message_bytes=self._settings.max_message_bytes,
            max_bytes_in_flight=self._settings.max_bytes_in_flight,
            codecs=self._settings.codecs,
            proof=self._identity.proof_for(hello.secret),
            **offers,
        )
        return frames.envelope(link_pb2.Frame(welcome=welcome))

    def _on_cut(self, accepted: _Accepted, carrier: SocketCarrier, reason: str) -> None:
        del reason
        if carrier.lacked_descriptors:  # the next one would be cut again
            self._avoids_same_host_until = time.monotonic() + _AVOID_SAME_HOST_SECONDS
        assert carrier.parent is not None
        self._leave(accepted, carrier.parent)

    def _leave(self, accepted: _Accepted, stream: GrpcStream) -> None:
        session = accepted.session
        with self._lock:
            # Not before: the session may be being attached to a socket that the stream has led to.
            session.detach(stream)
            if accepted.stream is not stream or accepted.lease is not None:
                return  # the client has reconnected, or its lease runs already
            if self._closed or session.ended is not None:
                return
            accepted.lease = call_later(self._settings.lease, partial(self._expire, accepted, stream))
        log.info("the connection of %s was cut; its lease runs for %g s", session.peer, self._settings.lease)

    def _expire(self, accepted: _Accepted, stream: GrpcStream) -> None:
        with self._lock:
            if accepted.stream is not stream:
                return  # the client has reconnected
            # From here on the client can no longer resume the session.
            self._accepted.pop(accepted.key, None)
        peer = accepted.session.peer
        log.info("the lease of %s ran out", peer)
        accepted.session.abort(
            WorkerLost(f"{peer} was out of reach for {self._settings.lease:g} s", worker=str(peer))
        )

    def _forget(self, accepted: _Accepted) -> None:
        with self._lock:
            self._accepted.pop(accepted.key, None)
            lease = accepted.lease
        if lease is not None:
            lease.cancel()
        log.info("%s has gone", accepted.session.peer)


def _printable(name: str) -> str:
    """A client's name, made safe for logs and messages."""
    return "".join(character if character.isprintable() else "?" for character in name[:100])


def _read_hello(requests: Iterator[bytes]) -> link_pb2.Hello:
    received = frames.parse(next(requests, b""))
    if len(received) != 1 or received[0].WhichOneof("kind") != "hello":
        raise ProtocolError("a stream must start with Hello alone")
    hello = received[0].hello
    if hello.protocol != PROTOCOL:
        raise ProtocolError(
            f"protocol {hello.protocol} is not spoken here, only {PROTOCOL}; "
            "use the same version of gradwire at both ends"
        )
    if not hello.peer or not hello.session:
        raise ProtocolError("Hello must name a peer and a session")
    if not is_secret_of(hello.peer, hello.secret):
        raise PermissionDenied("Hello names a peer, and does not prove to come from it")
    return hello
