"""If the local socket that a worker offers leads nowhere, its clients use the network."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.conformance.ends import SECONDS, Memory, Peer, serving
from tests.conformance.test_links import PING, attachments_of

from gradwire.proto.v1 import link_pb2
from gradwire.transport import GrpcLink, LinkSettings, frames


class Detour:
    """A local socket that is offered instead of the worker's own."""

    def __init__(self) -> None:
        self._name = f"gradwire-test-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(8)
        self._listener.settimeout(SECONDS)
        self.offers: list[link_pb2.SameHost] = []
        """The worker's offer of each attempt."""

    def between(self, written: Iterator[bytes]) -> Iterator[bytes]:
        (frame,) = frames.parse(next(written))
        if frame.welcome.HasField("same_host"):
            self.offers.append(link_pb2.SameHost.FromString(frame.welcome.same_host.SerializeToString()))
            frame.welcome.same_host.socket = self._name
        yield frames.envelope(frame)
        yield from written

    def overhear(self) -> bytes:
        """The bytes that a client sends here before it gives up."""
        waiting, _ = self._listener.accept()
        with waiting:
            waiting.settimeout(SECONDS)
            return b"".join(iter(lambda: waiting.recv(64), b""))

    def bring(self, said: bytes) -> bytes:
        """Sends these bytes to the worker, as if the client came late. Returns the worker's response."""
        with socket.socket(socket.AF_UNIX) as late:
            late.settimeout(SECONDS)
            late.connect(f"\0{self.offers[0].socket}")
            late.sendall(said)
            return late.recv(1)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def detour() -> Iterator[Detour]:
    detour = Detour()
    yield detour
    detour.close()


@contextmanager
def connected(detour: Detour) -> Iterator[GrpcLink]:
    settings = LinkSettings(connect_timeout=SECONDS, lost_after=SECONDS)
    here, there = Peer("here"), Peer("there")
    with serving(there, settings, detour.between) as (_, address):
        link = GrpcLink(address, here.identity, here.handle, settings)
        link.connect()
        try:
            yield link
        finally:
            link.close()


def test_a_socket_without_a_listener_is_not_used(detour: Detour) -> None:
    with connected(detour) as link:
        for _ in range(3):
            assert attachments_of(link.send_request(PING, b"", [Memory(bytes(200_000))])) == [bytes(200_000)]
        assert link.connected
        assert len(detour.offers) == 1  # the first attempt succeeded


def test_a_late_client_is_refused_at_the_socket(detour: Detour) -> None:
    with ThreadPoolExecutor(1) as pool:
        overheard = pool.submit(detour.overhear)
        with connected(detour) as link:
            assert detour.bring(overheard.result(SECONDS)) == b""
            assert attachments_of(link.send_request(PING, b"", [Memory(bytes(200_000))])) == [bytes(200_000)]
            assert link.connected
            assert len(detour.offers) == 1
