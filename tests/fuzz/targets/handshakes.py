"""The first frames of a stream: Hello, as a worker reads it, and Welcome, as a client does."""

from __future__ import annotations

from tests.fuzz.inputs import Input
from tests.fuzz.target import Target
from tests.integration.test_hostile import peer_of

from gradwire.errors import GradwireError, LinkError, MalformedMessage, PermissionDenied
from gradwire.proto.v1 import link_pb2
from gradwire.transport import (
    PROTOCOL,
    GrpcLink,
    LinkSettings,
    OwnIdentity,
    faults,
    frames,
    grpc_link,
    native,
)
from gradwire.transport.addresses import remote_of
from gradwire_server.serving import acceptor

__all__ = ["Hellos", "Welcomes"]

_SECRET = bytes(range(32))
_HELLO = link_pb2.Hello(
    protocol=PROTOCOL,
    peer=peer_of(_SECRET),
    secret=_SECRET,
    name="client",
    session=6,
    attempt=1,
    max_message_bytes=1 << 30,
    codecs=[1, 2],
)
_WELCOME = link_pb2.Welcome(
    protocol=PROTOCOL,
    peer=7,
    proof=bytes(32),
    name="worker",
    lease_seconds=30.0,
    max_message_bytes=1 << 30,
    max_bytes_in_flight=1 << 30,
    same_host=link_pb2.SameHost(socket="gradwire-1", token=bytes(32), seen_address="ipv4:127.0.0.1:1"),
    direct=link_pb2.Direct(port=1, token=bytes(32), seen_address="ipv6:%5B::1%5D:1"),
    codecs=[1, 2],
)


class Hellos(Target):
    name = "hellos"
    refuses = (MalformedMessage, LinkError, PermissionDenied)
    kinds = (link_pb2.Envelope,)

    def corpus(self) -> dict[str, Input]:
        return {
            "hello": (frames.envelope(link_pb2.Frame(hello=_HELLO)),),
            "goodbye": (frames.goodbye(faults.describe(ValueError("x"), "client")),),
        }

    def run(self, parts: Input) -> object:
        hello = acceptor._read_hello(iter(parts))
        assert acceptor._printable(hello.name).isprintable()
        return hello


class Welcomes(Target):
    name = "welcomes"
    refuses = (GradwireError,)  # the worker's own errors among them, and _Broken
    kinds = (link_pb2.Envelope,)
    words = ("ipv4:127.0.0.1:1", "ipv6:%5B::1%5D:99999", "ipv4:%00:1", "unix:", "ipv4:1.2.3.4:²")

    def corpus(self) -> dict[str, Input]:
        return {
            "welcome": (frames.envelope(link_pb2.Frame(welcome=_WELCOME)),),
            "goodbye": (frames.goodbye(faults.describe(ValueError("x"), "worker")),),
        }

    def run(self, parts: Input) -> object:
        link = GrpcLink("127.0.0.1:1", OwnIdentity.new("client"), lambda _: None, LinkSettings())
        try:
            welcome = link._welcome(grpc_link._first_frame(iter(parts)))
        except grpc_link._Broken:
            return None
        assert native.is_used() is False
        for offer in (welcome.same_host, welcome.direct):
            assert remote_of(offer.seen_address, "127.0.0.1:1") is None
        return str(link.peer)
