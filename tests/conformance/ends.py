"""The two peers of a link of each kind, for one suite over all kinds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import grpc
from tests.conformance.switching import Switch

from gradwire.errors import GradwireError
from gradwire.transport import GrpcLink, InProcessLink, Link, LinkSettings, OwnIdentity, ServerCall
from gradwire.transport.channels import SERVICE, server_options
from gradwire_server.serving.acceptor import SessionAcceptor

__all__ = ["CARRIED", "KINDS", "SECONDS", "STEADY", "SWITCHED", "Ends", "Memory", "Peer", "opened"]

STEADY = ("in-process", "grpc", "unix", "tcp")
SWITCHED = ("unix and grpc", "tcp and grpc")
"""Links whose carrier dies while they are used, after which the other one carries them."""
CARRIED = ("grpc", "unix", "tcp", *SWITCHED)
"""Links that outlive their connection."""
KINDS = (*STEADY, *SWITCHED)
SECONDS = 20.0
"""Longer than anything here takes: an event that has not happened by then never will."""


class Memory:
    """An attachment. After `modify` it counts as written to while it was sent."""

    def __init__(self, content: bytes | memoryview) -> None:
        self._view = memoryview(content)
        self._error: GradwireError | None = None

    @property
    def view(self) -> memoryview:
        return self._view

    def modify(self, error: GradwireError) -> None:
        self._error = error

    def check_unmodified(self) -> None:
        if self._error is not None:
            raise self._error


def echo(server_call: ServerCall) -> None:
    """Responds with the request's body and attachments."""
    attachments = [Memory(attachment.data) for attachment in server_call.request.attachments]
    server_call.respond(server_call.request.body, attachments)


@dataclass
class Peer:
    """A peer that records the requests it received, and how it responds to them."""

    name: str
    respond: Callable[[ServerCall], None] = echo
    received: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.identity = OwnIdentity.new(self.name)
        self.on_arrival: Callable[[], None] = lambda: None
        self._changed = threading.Condition()

    def handle(self, server_call: ServerCall) -> None:
        with self._changed:
            self.received.append(server_call.request.body)
            self._changed.notify_all()
        self.on_arrival()
        self.respond(server_call)

    def wait_for_requests(self, times: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.received) >= times, SECONDS)


@dataclass
class Ends:
    """Both ends of one link, and the peers that they belong to."""

    left: Link
    right: Link
    here: Peer
    there: Peer
    acceptor: SessionAcceptor | None = None
    switch: Switch | None = None

    def calm_down(self) -> None:
        """Has nothing cut the link any more: its end can be told to the other peer."""
        if self.switch:
            self.switch.stop()


@contextmanager
def opened(kind: str, settings: LinkSettings | None = None) -> Iterator[Ends]:
    """A link of the given kind. It is closed at the end."""
    here, there = Peer("here"), Peer("there")
    settings = settings or LinkSettings(connect_timeout=SECONDS, chunk_bytes=1 << 16)
    if kind == "in-process":
        left, right = InProcessLink.pair(
            (here.identity, here.handle), (there.identity, there.handle), settings
        )
        try:
            yield Ends(left, right, here, there)
        finally:
            left.close()
            right.close()
        return
    settings = replace(settings, same_host=kind.startswith("unix"), direct=kind.startswith("tcp"))
    switch = Switch() if kind in SWITCHED else None
    with serving(there, settings, *([switch.between] if switch else [])) as (acceptor, address):
        link = GrpcLink(address, here.identity, here.handle, settings)
        link.connect()
        try:
            (right_end,) = acceptor.sessions
            if switch:
                switch.watch(link, right_end)
                here.on_arrival = there.on_arrival = switch.moment
            yield Ends(link, right_end, here, there, acceptor, switch)
        finally:
            link.close()


Writes = Iterator[bytes]
Between = Callable[[Writes], Writes]
"""Sees, and may change, the data that a worker writes to a stream."""


@contextmanager
def serving(
    peer: Peer, settings: LinkSettings, between: Between = lambda written: written
) -> Iterator[tuple[SessionAcceptor, str]]:
    """A gRPC server with an acceptor and nothing else."""
    acceptor = SessionAcceptor(peer.identity, peer.handle, settings)
    acceptor.direct_address = "127.0.0.1:0"
    pool = ThreadPoolExecutor(50, thread_name_prefix="gradwire-test")
    server = grpc.server(pool, options=server_options(settings))
    handler = grpc.stream_stream_rpc_method_handler(
        lambda requests, context: between(acceptor.serve(requests, context))
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Link": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield acceptor, f"127.0.0.1:{port}"
    finally:
        acceptor.close()
        server.stop(1.0).wait(SECONDS)
        pool.shutdown()
