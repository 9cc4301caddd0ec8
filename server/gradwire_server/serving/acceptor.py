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

from gradwire.errors import GradwireError, ProtocolError, Unavailable, WorkerLost
from gradwire.proto.v1 import link_pb2
from gradwire.system.timers import Timer, call_later
from gradwire.transport import (
    PROTOCOLS,
    Budget,
    EventLoop,
    Handler,
    Link,
    LinkSettings,
    LocalListener,
    LocalStreams,
    MemoryBudget,
    NativeSession,
    NativeStream,
    PeerIdentity,
    Session,
    StreamPair,
    accept_handshake,
    faults,
    frames,
)

__all__ = ["SessionAcceptor"]

log = logging.getLogger("gradwire.server.links")

Hello = link_pb2.Hello


@dataclass(slots=True, eq=False)
class _Accepted:
    key: tuple[int, int]
    session: Session | NativeSession
    streams: Any
    """The streams of the latest attempt: a StreamPair of a Session, a NativeStream of a NativeSession."""
    attempt: int
    attached: Any = None
    """The streams that the session is attached to in this attempt: the gRPC streams, or the
    local socket that they led to. None until the client has chosen, by opening the bulk stream
    or by connecting to the socket."""
    lease: Timer | None = None
    """The timer of the lease; runs while the client is disconnected."""

    @property
    def is_choosing(self) -> bool:
        """Whether the client is connected, and has yet to choose between the network and the local socket."""
        return self.attached is None and self.lease is None


class SessionAcceptor:
    """All sessions that clients have opened with this worker.

    Its lock is taken before a session's lock, never while one is held.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        handler: Handler,
        settings: LinkSettings,
        on_open: Callable[[Link], None] = lambda _: None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self._budget = budget or MemoryBudget()
        self._native_budget = Budget(self._budget.max_bytes)
        self._identity = identity
        self._handler = handler
        self._on_open = on_open
        self._settings = settings
        self._lock = threading.Lock()
        self._accepted: dict[tuple[int, int], _Accepted] = {}
        self._readers: set[threading.Thread] = set()
        self._closed = False
        self._local_listener: LocalListener | None = None
        """Opened for the first client that could use it."""
        self._event_loop: EventLoop | None = None
        """Reads the local connections; started with the first of them."""

    @property
    def sessions(self) -> list[Session | NativeSession]:
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
        if self._local_listener is not None:
            self._local_listener.close()  # no other is opened from now on: new clients are refused

    def join(self, timeout: float) -> None:
        """Waits for the reading threads; they end with their streams."""
        give_up_at = time.monotonic() + timeout
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.join(max(give_up_at - time.monotonic(), 0.0))
        if self._event_loop is not None:
            self._event_loop.close(max(give_up_at - time.monotonic(), 0.0))

    def serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The gRPC method Link: yields the data to write, while another thread reads."""
        silence = call_later(self._settings.hello_timeout, context.cancel)
        try:
            hello = _read_hello(requests)
            may_be_local = hello.same_host and hello.protocol == 1
            local_listener = self._open_local_listener() if may_be_local else None
            accepted, resumed = self._join(hello, context.peer(), has_choice=local_listener is not None)
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
        streams = accepted.streams
        # gRPC calls back whatever way the stream ends; this generator, which waits for data to write, would
        # not notice. One stream is of no use without the other; the client opens both anew.
        if not context.add_callback(partial(self._leave, accepted, streams)):
            self._leave(accepted, streams)
            return
        reader = threading.Thread(
            target=self._read,
            args=(requests, accepted, streams),
            name=f"gradwire-read-{accepted.session.peer.name}",
            daemon=True,
        )
        with self._lock:
            self._readers.add(reader)
        reader.start()
        if isinstance(streams, NativeStream):
            yield self._welcome(hello, resumed)
            yield from streams
            return
        if hello.role == Hello.ROLE_BULK:
            yield self._welcome(hello, resumed)
            yield from streams.bulk
            return
        if local_listener is None:
            yield self._welcome(hello, resumed)
            yield from streams.control
            return
        offer = local_listener.offer((accepted, streams), context.peer())
        try:
            yield self._welcome(hello, resumed, offer)
            yield from streams.control
        finally:
            local_listener.forget(offer)

    def _open_local_listener(self) -> LocalListener | None:
        with self._lock:
            if self._local_listener is None and self._settings.same_host and not self._closed:
                self._local_listener = LocalListener.open(self._on_handshake)
            return self._local_listener

    def _open_event_loop(self) -> EventLoop:
        with self._lock:
            if self._event_loop is None:
                self._event_loop = EventLoop()
                if self._closed:
                    self._event_loop.close()  # connections that come this late are not served
            return self._event_loop

    def _on_handshake(self, purpose: object, connection: socket.socket) -> None:
        """Attaches the session of a client on this host to its local socket, and
        reads the socket to its end."""
        assert isinstance(purpose, tuple)
        accepted, parent = purpose
        event_loop = self._open_event_loop()
        local = LocalStreams(self._settings, accepted.session.quota, connection, parent)
        with self._lock:
            if accepted.streams is not parent or not accepted.is_choosing or self._closed:
                raise ConnectionAbortedError("the client has reconnected, or uses the network")
            self._readers.add(threading.current_thread())
            accepted.attached = local
            accepted.session.attach(local)
        try:
            # Only after `attach`: earlier frames would go over the control stream,
            # which the client no longer reads.
            accept_handshake(connection)
        except OSError:
            local.close(discard=True)
        try:
            local.run(accepted.session, event_loop)
        except GradwireError as error:
            accepted.session.refuse(error)
        finally:
            self._leave(accepted, parent)
            with self._lock:
                self._readers.discard(threading.current_thread())

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
            if accepted is not None and (hello.protocol == 1) != isinstance(accepted.session, Session):
                raise ProtocolError("a session goes on with the protocol that it began with")
            if hello.role == Hello.ROLE_BULK:
                if accepted is None or accepted.attempt != hello.attempt:
                    raise ProtocolError("a bulk stream for a session that is not open")
                if accepted.is_choosing:
                    self._attach_streams(accepted)
                if accepted.attached is not accepted.streams:
                    raise ProtocolError("a bulk stream for a session that uses a local socket")
                return accepted, True
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
                accepted.session.detach(accepted.streams)
                accepted.streams = self._new_streams(accepted.session)
                accepted.attempt, accepted.attached, accepted.lease = hello.attempt, None, None
            if not has_choice:
                self._attach_streams(accepted)
        if not resumed:
            accepted.session.when_ended(lambda _: self._forget(accepted))
            self._on_open(accepted.session)
            log.info("%s connected from %s", accepted.session.peer, address)
        return accepted, resumed

    def _attach_streams(self, accepted: _Accepted) -> None:
        """Attaches the gRPC streams. The lock is held, so that of two attempts the
        later one is attached last."""
        accepted.attached = accepted.streams
        accepted.session.attach(accepted.streams)

    def _accept(self, key: tuple[int, int], hello: link_pb2.Hello, address: str) -> _Accepted:
        peer = PeerIdentity(hello.peer, _printable(hello.name) or address)
        session: Session | NativeSession
        if hello.protocol == 1:
            session = Session(self._identity, peer, self._handler, self._settings, self._budget)
        else:
            session = NativeSession(self._identity, peer, self._handler, self._settings, self._native_budget)
        session.peer_max_message_bytes = hello.max_message_bytes or (1 << 62)
        session.limit_bytes_in_flight(hello.max_bytes_in_flight)
        session.peer_codecs = frozenset(hello.codecs)
        return _Accepted(key, session, self._new_streams(session), hello.attempt)

    def _new_streams(self, session: Session | NativeSession) -> Any:
        if isinstance(session, NativeSession):
            return NativeStream(session)
        return StreamPair(self._settings, session.quota)

    def _welcome(self, hello: link_pb2.Hello, resumed: bool, offer: link_pb2.SameHost | None = None) -> bytes:
        welcome = link_pb2.Welcome(
            protocol=hello.protocol,
            peer=self._identity.id,
            name=self._identity.name,
            resumed=resumed,
            lease_seconds=self._settings.lease,
            max_message_bytes=self._settings.max_message_bytes,
            max_bytes_in_flight=self._settings.max_bytes_in_flight,
            codecs=self._settings.codecs,
            same_host=offer,
        )
        return frames.envelope(link_pb2.Frame(welcome=welcome))

    def _read(self, requests: Iterator[bytes], accepted: _Accepted, streams: Any) -> None:
        session = accepted.session
        try:
            for data in requests:
                session.receive_or_refuse(data, streams)
        except grpc.RpcError:
            pass  # the stream was cut
        finally:
            streams.close()
            with self._lock:
                self._readers.discard(threading.current_thread())

    def _leave(self, accepted: _Accepted, streams: Any) -> None:
        session = accepted.session
        session.detach(streams)
        with self._lock:
            if accepted.streams is not streams or accepted.lease is not None:
                return  # the client has reconnected, or its lease runs already
            if self._closed or session.ended is not None:
                return
            accepted.lease = call_later(self._settings.lease, partial(self._expire, accepted, streams))
        log.info("the connection of %s was cut; its lease runs for %g s", session.peer, self._settings.lease)

    def _expire(self, accepted: _Accepted, streams: Any) -> None:
        with self._lock:
            if accepted.streams is not streams:
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
    if hello.protocol not in PROTOCOLS:
        raise ProtocolError(
            f"protocol {hello.protocol} is not spoken here, only {' and '.join(map(str, PROTOCOLS))}; "
            "use the same version of gradwire at both ends"
        )
    roles = (Hello.ROLE_CONTROL, Hello.ROLE_BULK) if hello.protocol == 1 else (Hello.ROLE_CONTROL,)
    if not hello.peer or not hello.session or hello.role not in roles:
        raise ProtocolError("Hello must name a peer, a session and a role")
    return hello
