"""The accepting end of links: finds the conversation that a stream belongs to, and keeps the lease."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from gradwire.errors import GradwireError, ProtocolError, WorkerLost
from gradwire.proto.v1 import link_pb2
from gradwire.transport import (
    PROTOCOL,
    Conversation,
    Handler,
    Identity,
    LinkSettings,
    Streams,
    Timer,
    call_later,
    faults,
    frames,
)

__all__ = ["Hub"]

log = logging.getLogger("gradwire.server.links")

Hello = link_pb2.Hello

_HELLO_SECONDS = 10.0
"""A stream that says nothing for so long after it was opened is cut."""


@dataclass(slots=True, eq=False)
class _Session:
    conversation: Conversation
    streams: Streams
    attempt: int
    lease: Timer | None = None


class Hub:
    """All conversations that clients opened with this worker."""

    def __init__(self, identity: Identity, handler: Handler, settings: LinkSettings) -> None:
        self._identity = identity
        self._handler = handler
        self._settings = settings
        self._lock = threading.Lock()
        self._sessions: dict[tuple[int, int], _Session] = {}

    @property
    def conversations(self) -> list[Conversation]:
        with self._lock:
            return [session.conversation for session in self._sessions.values()]

    def close(self) -> None:
        """Says goodbye to every client."""
        for conversation in self.conversations:
            conversation.close()

    def serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The gRPC method Link: yields what is to be written, while a thread reads."""
        silence = call_later(_HELLO_SECONDS, context.cancel)
        try:
            hello = _read_hello(requests)
            silence.cancel()
            session, resumed = self._join(hello, context.peer())
        except GradwireError as error:
            log.warning("refused a stream from %s: %s", context.peer(), error)
            yield frames.goodbye(faults.describe(error, self._identity.name))
            return
        streams, conversation = session.streams, session.conversation
        is_control = hello.role == Hello.ROLE_CONTROL
        outbox = streams.control if is_control else streams.bulk
        # Without it a handler that waits for something to write would outlive a client that went away.
        if not context.add_callback(lambda: outbox.close(discard=True)):
            self._leave(session, streams)
            return
        yield self._welcome(resumed)
        if is_control:
            conversation.attach(streams)
        reader = threading.Thread(
            target=self._read,
            args=(requests, session, streams),
            name=f"gradwire-read-{conversation.peer.name}",
            daemon=True,
        )
        reader.start()
        try:
            yield from outbox
        finally:
            # One stream without the other is of no use; the client opens both anew.
            self._leave(session, streams)

    def _join(self, hello: link_pb2.Hello, address: str) -> tuple[_Session, bool]:
        key = (hello.node, hello.session)
        with self._lock:
            session = self._sessions.get(key)
            if hello.role == Hello.ROLE_BULK:
                if session is None or session.attempt != hello.attempt:
                    raise ProtocolError("a bulk stream for a conversation that is not open")
                return session, True
            if session is not None and session.attempt >= hello.attempt:
                raise ProtocolError("a stream of an attempt that has been superseded")
            streams = Streams(self._settings)
            if session is not None:
                if session.lease is not None:
                    session.lease.cancel()
                session.streams, session.attempt, session.lease = streams, hello.attempt, None
                return session, True
            peer = Identity(hello.node, hello.name or address)
            conversation = Conversation(self._identity, peer, self._handler, self._settings)
            conversation.peer_max_message_bytes = hello.max_message_bytes or (1 << 62)
            session = self._sessions[key] = _Session(conversation, streams, hello.attempt)
        conversation.when_ended(lambda _: self._forget(key))
        log.info("%s connected from %s", peer, address)
        return session, False

    def _welcome(self, resumed: bool) -> bytes:
        welcome = link_pb2.Welcome(
            protocol=PROTOCOL,
            node=self._identity.node,
            name=self._identity.name,
            resumed=resumed,
            lease_seconds=self._settings.lease,
            max_message_bytes=self._settings.max_message_bytes,
        )
        return frames.envelope(link_pb2.Frame(welcome=welcome))

    def _read(self, requests: Iterator[bytes], session: _Session, streams: Streams) -> None:
        conversation = session.conversation
        try:
            for data in requests:
                conversation.receive(data, streams)
        except GradwireError as error:
            log.warning("%s broke the protocol: %s", conversation.peer, error)
            conversation.refuse(error)
        except Exception as error:
            # gRPC's request iterator raises a bare Exception when the call was cut.
            if type(error) is not Exception and not isinstance(error, grpc.RpcError):
                log.exception("reading from %s failed", conversation.peer)
        finally:
            streams.close()

    def _leave(self, session: _Session, streams: Streams) -> None:
        conversation = session.conversation
        if not conversation.detach(streams) or conversation.ended is not None:
            return
        log.info("the link of %s was cut; its lease runs for %g s", conversation.peer, self._settings.lease)
        with self._lock:
            if session.streams is streams:
                session.lease = call_later(self._settings.lease, lambda: self._expire(session, streams))

    def _expire(self, session: _Session, streams: Streams) -> None:
        with self._lock:
            if session.streams is not streams:
                return  # it came back
        peer = session.conversation.peer
        log.info("the lease of %s ran out", peer)
        session.conversation.abort(
            WorkerLost(f"{peer} was out of reach for {self._settings.lease:g} s", worker=str(peer))
        )

    def _forget(self, key: tuple[int, int]) -> None:
        with self._lock:
            session = self._sessions.pop(key, None)
        if session is not None:
            log.info("%s has gone", session.conversation.peer)


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
