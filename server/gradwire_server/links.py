"""The accepting end of links: finds the conversation that a stream belongs to, and keeps the lease."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import grpc

from gradwire.errors import GradwireError, ProtocolError, Unavailable, WorkerLost
from gradwire.proto.v1 import link_pb2
from gradwire.transport import (
    PROTOCOL,
    Conversation,
    Handler,
    Identity,
    Link,
    LinkSettings,
    LocalStreams,
    MeetingPoint,
    Reception,
    Room,
    StreamPair,
    Streams,
    Timer,
    call_later,
    confirm,
    faults,
    frames,
)

__all__ = ["Hub"]

log = logging.getLogger("gradwire.server.links")

Hello = link_pb2.Hello


@dataclass(slots=True, eq=False)
class _Session:
    key: tuple[int, int]
    conversation: Conversation
    streams: StreamPair
    """The streams of the latest attempt."""
    attempt: int
    carrier: Streams | None = None
    """What carries the conversation in this attempt: the streams, or the local socket that they led to. None
    until the client has shown which by opening the other stream, or by coming to the socket."""
    lease: Timer | None = None
    """Runs while the client is away."""

    @property
    def is_choosing(self) -> bool:
        """Whether the client is there, and has yet to show which way it goes."""
        return self.carrier is None and self.lease is None


class Hub:
    """All conversations that clients opened with this worker.

    Its lock is taken before a conversation's, never while one is held.
    """

    def __init__(
        self,
        identity: Identity,
        handler: Handler,
        settings: LinkSettings,
        on_open: Callable[[Link], None] = lambda _: None,
        room: Room | None = None,
    ) -> None:
        self._room = room or Room()
        self._identity = identity
        self._handler = handler
        self._on_open = on_open
        self._settings = settings
        self._lock = threading.Lock()
        self._sessions: dict[tuple[int, int], _Session] = {}
        self._readers: set[threading.Thread] = set()
        self._closed = False
        self._meeting_point: MeetingPoint | None = None
        """Opened for the first client that could come there."""
        self._reception: Reception | None = None
        """For those who came."""

    @property
    def conversations(self) -> list[Conversation]:
        with self._lock:
            return [session.conversation for session in self._sessions.values()]

    def wait_until_delivered(self, timeout: float) -> bool:
        """Whether all large answers have arrived at their askers in time."""
        give_up_at = time.monotonic() + timeout
        return all(
            conversation.wait_until_delivered(max(give_up_at - time.monotonic(), 0.0))
            for conversation in self.conversations
        )

    def close(self) -> None:
        """Says goodbye to every client, and takes no new ones."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions.values())
        for session in sessions:
            if session.lease is not None:
                session.lease.cancel()
            session.conversation.close(leaving=True)
        if self._meeting_point is not None:
            self._meeting_point.close()  # nobody opens another: who comes now is refused

    def join(self, timeout: float) -> None:
        """Waits for the threads that read; they end with their streams."""
        give_up_at = time.monotonic() + timeout
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.join(max(give_up_at - time.monotonic(), 0.0))
        if self._reception is not None:
            self._reception.close(max(give_up_at - time.monotonic(), 0.0))

    def serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The gRPC method Link: yields what is to be written, while a thread reads."""
        silence = call_later(self._settings.hello_timeout, context.cancel)
        try:
            hello = _read_hello(requests)
            meeting_point = self._open_meeting_point() if hello.same_host else None
            session, resumed = self._join(hello, context.peer(), has_choice=meeting_point is not None)
        except GradwireError as error:
            log.warning("refused a stream from %s: %s", context.peer(), error)
            yield frames.goodbye(faults.describe(error, self._identity.name))
            return
        except grpc.RpcError:
            return  # it ended, or was silent for too long
        finally:
            silence.cancel()
        if session is None:
            yield self._welcome(resumed=False)
            return
        streams = session.streams
        # gRPC calls back whatever way the stream ends: a handler that waits for something to write would
        # not notice. One stream without the other is of no use; the client opens both anew.
        if not context.add_callback(partial(self._leave, session, streams)):
            self._leave(session, streams)
            return
        reader = threading.Thread(
            target=self._read,
            args=(requests, session, streams),
            name=f"gradwire-read-{session.conversation.peer.name}",
            daemon=True,
        )
        with self._lock:
            self._readers.add(reader)
        reader.start()
        if hello.role == Hello.ROLE_BULK:
            yield self._welcome(resumed)
            yield from streams.bulk
            return
        if meeting_point is None:
            yield self._welcome(resumed)
            yield from streams.control
            return
        offer = meeting_point.offer((session, streams), context.peer())
        try:
            yield self._welcome(resumed, offer)
            yield from streams.control
        finally:
            meeting_point.forget(offer)

    def _open_meeting_point(self) -> MeetingPoint | None:
        with self._lock:
            if self._meeting_point is None and self._settings.same_host and not self._closed:
                self._meeting_point = MeetingPoint.open(self._on_met)
            return self._meeting_point

    def _open_reception(self) -> Reception:
        with self._lock:
            if self._reception is None:
                self._reception = Reception()
                if self._closed:
                    self._reception.close()  # who comes so late is not attended to
            return self._reception

    def _on_met(self, purpose: object, connection: socket.socket) -> None:
        """A client of this host came, who has a stream already: reads what it says from here on."""
        assert isinstance(purpose, tuple)
        session, beneath = purpose
        reception = self._open_reception()
        local = LocalStreams(self._settings, session.conversation.allowance, connection, beneath)
        with self._lock:
            if session.streams is not beneath or not session.is_choosing or self._closed:
                raise ConnectionAbortedError("the client has come back, or has gone another way")
            self._readers.add(threading.current_thread())
            session.carrier = local
            session.conversation.attach(local)
        try:
            # Only now: what is said to the client before would go over the stream, where it does not look.
            confirm(connection)
        except OSError:
            local.close(discard=True)
        try:
            local.carry(session.conversation, reception)
        except GradwireError as error:
            session.conversation.refuse(error)
        finally:
            self._leave(session, beneath)
            with self._lock:
                self._readers.discard(threading.current_thread())

    def _join(self, hello: link_pb2.Hello, address: str, *, has_choice: bool) -> tuple[_Session | None, bool]:
        """The session that a stream belongs to, and whether it was there before.

        Nothing is written before it is known what carries the conversation: what waits for a stream that the
        client does not open, or does not read, would be lost, and would be kept for as long as it is open.
        """
        key = (hello.node, hello.session)
        with self._lock:
            if self._closed:
                raise Unavailable(f"{self._identity.name} is shutting down", worker=self._identity.name)
            session = self._sessions.get(key)
            if hello.role == Hello.ROLE_BULK:
                if session is None or session.attempt != hello.attempt:
                    raise ProtocolError("a bulk stream for a conversation that is not open")
                if session.is_choosing:
                    self._carry_over_streams(session)
                if session.carrier is not session.streams:
                    raise ProtocolError("a bulk stream for a conversation that goes another way")
                return session, True
            if session is None and hello.resume:
                return None, False  # what it had here is gone; all it needs is to hear so
            if session is not None and session.attempt >= hello.attempt:
                raise ProtocolError("a stream of an attempt that has been superseded")
            resumed = session is not None
            if session is None:
                session = self._sessions[key] = self._new_session(key, hello, address)
            else:
                if session.lease is not None:
                    session.lease.cancel()
                session.conversation.detach(session.streams)
                session.streams = StreamPair(self._settings, session.conversation.allowance)
                session.attempt, session.carrier, session.lease = hello.attempt, None, None
            if not has_choice:
                self._carry_over_streams(session)
        if not resumed:
            session.conversation.when_ended(lambda _: self._forget(session))
            self._on_open(session.conversation)
            log.info("%s connected from %s", session.conversation.peer, address)
        return session, resumed

    def _carry_over_streams(self, session: _Session) -> None:
        """With the lock held, so that of two attempts the later one is attached last."""
        session.carrier = session.streams
        session.conversation.attach(session.streams)

    def _new_session(self, key: tuple[int, int], hello: link_pb2.Hello, address: str) -> _Session:
        peer = Identity(hello.node, _printable(hello.name) or address)
        conversation = Conversation(self._identity, peer, self._handler, self._settings, self._room)
        conversation.peer_max_message_bytes = hello.max_message_bytes or (1 << 62)
        conversation.peer_takes_in_flight(hello.max_bytes_in_flight)
        conversation.peer_codecs = frozenset(hello.codecs)
        streams = StreamPair(self._settings, conversation.allowance)
        return _Session(key, conversation, streams, hello.attempt)

    def _welcome(self, resumed: bool, offer: link_pb2.SameHost | None = None) -> bytes:
        welcome = link_pb2.Welcome(
            protocol=PROTOCOL,
            node=self._identity.node,
            name=self._identity.name,
            resumed=resumed,
            lease_seconds=self._settings.lease,
            max_message_bytes=self._settings.max_message_bytes,
            max_bytes_in_flight=self._settings.max_bytes_in_flight,
            codecs=self._settings.codecs,
            same_host=offer,
        )
        return frames.envelope(link_pb2.Frame(welcome=welcome))

    def _read(self, requests: Iterator[bytes], session: _Session, streams: Streams) -> None:
        conversation = session.conversation
        try:
            for data in requests:
                conversation.receive_or_refuse(data, streams)
        except grpc.RpcError:
            pass  # the stream was cut
        finally:
            streams.close()
            with self._lock:
                self._readers.discard(threading.current_thread())

    def _leave(self, session: _Session, streams: Streams) -> None:
        conversation = session.conversation
        conversation.detach(streams)
        with self._lock:
            if session.streams is not streams or session.lease is not None:
                return  # it came back, or this is known already
            if self._closed or conversation.ended is not None:
                return
            session.lease = call_later(self._settings.lease, partial(self._expire, session, streams))
        log.info("the link of %s was cut; its lease runs for %g s", conversation.peer, self._settings.lease)

    def _expire(self, session: _Session, streams: Streams) -> None:
        with self._lock:
            if session.streams is not streams:
                return  # it came back
            # From here on it cannot any more.
            self._sessions.pop(session.key, None)
        peer = session.conversation.peer
        log.info("the lease of %s ran out", peer)
        session.conversation.abort(
            WorkerLost(f"{peer} was out of reach for {self._settings.lease:g} s", worker=str(peer))
        )

    def _forget(self, session: _Session) -> None:
        with self._lock:
            self._sessions.pop(session.key, None)
            lease = session.lease
        if lease is not None:
            lease.cancel()
        log.info("%s has gone", session.conversation.peer)


def _printable(name: str) -> str:
    """A name from afar that can be logged and shown."""
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
    if not hello.node or not hello.session or hello.role not in (Hello.ROLE_CONTROL, Hello.ROLE_BULK):
        raise ProtocolError("Hello must name a node, a session and a role")
    return hello
