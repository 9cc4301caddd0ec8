"""Whatever is sent to a worker: a clear error, the worker lives, others notice nothing, nothing leaks."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import math
import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tests.conftest import Workers

import gradwire as gw
import gradwire_server as gws
from gradwire.proto.v1 import autograd_pb2, link_pb2, tensor_pb2, value_pb2
from gradwire.transport import PROTOCOL, frames, native
from gradwire_server.serving import acceptor

SECONDS = 20.0
LINK = "/gradwire.v1.Worker/Link"
FORWARD = "/gradwire.v1.Worker/ForwardWithAutograd"
Frame = link_pb2.Frame
Code = link_pb2.Error


class RawLink:
    """The frames of a link, written by hand: over the stream, or over a socket that the worker offers."""

    def __init__(self, address: str, hello: bytes | None = None, kind: str = "grpc", **more: Any) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._kind = kind
        self._host = address.rpartition(":")[0]
        self._channel = grpc.insecure_channel(address, options=options)
        self._outgoing: queue.SimpleQueue[Sent | None] = queue.SimpleQueue()
        self._to_stream: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._writer = threading.Thread(target=self._write, daemon=True)
        open_stream: Any = self._channel.stream_stream(LINK)
        self._call = open_stream(iter(self._to_stream.get, None), timeout=SECONDS)
        self._incoming = self._from_stream()
        wanted = hello_frame(same_host=kind == "unix", direct=kind == "tcp", **more)
        self.send_to_stream(frames.envelope(wanted) if hello is None else hello)
        self.offer = link_pb2.Welcome()

    def welcome(self) -> RawLink:
        """Also takes the socket, if the link is to go over one."""
        frame = next(self.receive())
        assert frame.WhichOneof("kind") == "welcome", frame
        self.offer = frame.welcome
        if self._kind != "grpc":
            self._socket = self.redeem()
            assert self._socket.recv(1) == b"\x01"
            self._incoming = self._from_socket(self._socket)
        self._writer.start()
        return self

    def redeem(self, more: bytes = b"") -> socket.socket:
        """Connects to the socket that was offered, and sends its token, and more with it."""
        if self.offer.HasField("same_host"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(SECONDS)
            connection.connect(f"\0{self.offer.same_host.socket}")
            connection.sendall(self.offer.same_host.token + more)
        else:
            connection = socket.create_connection((self._host, self.offer.direct.port), SECONDS)
            connection.sendall(self.offer.direct.token + more)
        return connection

    def send(self, data: Sent) -> None:
        """On a thread of its own: a worker that has had enough does not read the rest."""
        self._outgoing.put(data)

    def send_to_stream(self, data: bytes) -> None:
        self._to_stream.put(data)

    def _write(self) -> None:
        for data in iter(self._outgoing.get, None):
            encoded, descriptors = frames.envelope(data) if isinstance(data, Frame) else data, ()
            if isinstance(encoded, WithDescriptors):
                encoded, descriptors = encoded.data, encoded.descriptors
            if self._socket is None:
                assert not descriptors
                self._to_stream.put(encoded)
                continue
            try:
                if descriptors:
                    socket.send_fds(self._socket, [encoded], [*descriptors])
                else:
                    self._socket.sendall(encoded)
            except OSError:
                return  # the worker has closed it

    def _from_stream(self) -> Iterator[Frame]:
        for data in self._call:
            yield from frames.parse(data)

    def _from_socket(self, connection: socket.socket) -> Iterator[Frame]:
        """Envelopes follow one another without anything between them, and each is a list of frames."""
        with connection.makefile("rb") as stream:
            while stream.read(1):
                size = shift = 0
                while (byte := stream.read(1)[0]) & 0x80:
                    size |= (byte & 0x7F) << shift
                    shift += 7
                yield Frame.FromString(stream.read(size | byte << shift))

    def receive(self) -> Iterator[Frame]:
        """The frames that come. Several may come at once: whoever asks next goes on where this one stops."""
        return self._incoming

    def farewell(self) -> link_pb2.Error:
        """The error with which the other end says goodbye. Nothing may follow."""
        for frame in self.receive():
            if frame.WhichOneof("kind") == "goodbye":
                assert list(self.receive()) == []
                return frame.goodbye.error
        raise AssertionError("the stream ended without a goodbye")

    def respond(self) -> link_pb2.Response:
        for frame in self.receive():
            assert frame.WhichOneof("kind") != "goodbye", frame
            if frame.WhichOneof("kind") == "response":
                return frame.response
        raise AssertionError("the stream ended without a response")

    def __enter__(self) -> RawLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._outgoing.put(None)
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._writer.ident is not None:
            self._writer.join(SECONDS)
        if self._socket is not None:
            self._incoming.close()  # type: ignore[attr-defined]
            self._socket.close()
        self._to_stream.put(None)
        self._call.cancel()
        self._channel.close()


@dataclass(frozen=True)
class WithDescriptors:
    """Bytes, and descriptors that are passed with the first of them."""

    data: bytes
    descriptors: Sequence[int]


Sent = bytes | Frame | WithDescriptors


def peer_of(secret: bytes) -> int:
    """The id of the peer with a secret."""
    return int.from_bytes(hashlib.sha256(secret).digest()[:8], "little")


def hello_frame(**changes: Any) -> Frame:
    secret = changes.setdefault("secret", random.randbytes(32))
    fields = {
        "protocol": PROTOCOL,
        "peer": peer_of(secret),
        "session": random.getrandbits(63) + 1,
        "name": "hostile",
        "attempt": 1,
    }
    return Frame(hello=link_pb2.Hello(**{**fields, **changes}))


def request(
    id: int = 1, body: bytes = b"", method: int = link_pb2.METHOD_FORWARD_WITH_AUTOGRAD, **more: Any
) -> Frame:
    return Frame(request=link_pb2.Request(id=id, method=method, body=body, **more))  # type: ignore[arg-type]


def ping(id: int, **more: Any) -> Frame:
    return request(id, b"", link_pb2.METHOD_PING, **more)


def chunk(message: int, data: bytes, *, of_response: bool = False) -> Frame:
    return Frame(chunk=link_pb2.Chunk(message=message, of_response=of_response, data=data))


def cancel(id: int) -> Frame:
    return Frame(cancel=link_pb2.Cancel(id=id))


def acknowledge(*ids: int) -> Frame:
    return Frame(acknowledge=link_pb2.Acknowledge(ids=ids))


def placed(segment: int, size: int, message: int = 1, *, of_response: bool = False) -> Frame:
    return Frame(placed=link_pb2.Placed(segment=segment, size=size, message=message, of_response=of_response))


def together(*sent: Frame) -> bytes:
    """In one write."""
    return b"".join(map(frames.envelope, sent))


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, as protobuf writes it."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def raw(kind: str, content: bytes) -> bytes:
    """An Envelope with one frame, whose message is given as bytes."""
    return field(1, field(Frame.DESCRIPTOR.fields_by_name[kind].number, content))


def call(tensor: tensor_pb2.Tensor | None = None, storage: tensor_pb2.Storage | None = None) -> bytes:
    """A call with one tensor as its argument."""
    message = autograd_pb2.ForwardWithAutogradRequest(function="double")
    message.args.add(tensor=0)
    message.tensors.tensors.append(tensor or tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4]))
    message.tensors.storages.append(storage or tensor_pb2.Storage(size=16, inline=bytes(16)))
    return message.SerializeToString()


def nested(levels: int) -> bytes:
    """A list in a list in a list ..., written by hand: protobuf's own code would refuse to."""
    value = b"\x18\x02"
    for _ in range(levels):
        value = field(9, field(1, value))  # Value.list, List.items
    return field(1, b"echo") + field(2, value)


def attachment(size: int = 16) -> bytes:
    return call(storage=tensor_pb2.Storage(size=size, attachment=0))


def set_of_one_hash(count: int) -> bytes:
    """A call with a set of integers that all have the same hash."""
    message = autograd_pb2.ForwardWithAutogradRequest(function="echo")
    items = message.args.add().set.items
    for index in range(count):
        items.add(big_integer=(index * (2**61 - 1)).to_bytes(16, "little"))
    return message.SerializeToString()


F32 = tensor_pb2.DTYPE_FLOAT32
Tensor, Storage = tensor_pb2.Tensor, tensor_pb2.Storage


def segment_file(size: int = 1 << 17, seals: int | None = None) -> int:
    """Shared memory as a sender of attachments makes it."""
    descriptor = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    all_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, all_seals if seals is None else seals)
    return descriptor


SEGMENT, UNSEALED, MAY_GROW = (
    segment_file(),
    segment_file(seals=0),
    segment_file(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL),
)
NULL = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


def segment(id: int = 1, size: int = 1 << 17, descriptor: int = SEGMENT) -> WithDescriptors:
    return WithDescriptors(frames.envelope(Frame(segment=link_pb2.Segment(id=id, size=size))), [descriptor])


def returned(*segments: int) -> Frame:
    return Frame(returned=link_pb2.Returned(segments=segments))


def freed(*segments: int) -> Frame:
    return Frame(freed=link_pb2.Freed(segments=segments))


Breaks = dict[str, tuple[Sequence[Sent], str]]

# What ends the whole link: (frames after the welcome, part of the farewell).
BREAKS: Breaks = {
    "no protobuf": ([b"\xff\xff\xff"], "something that is no Frame"),
    "a cut off envelope": ([frames.envelope(request())[:-1], ping(2)], "something that is no Frame"),
    "deep garbage": ([b"\x0a\x7f" * 10_000], "a field is longer than its message"),
    "an empty frame": ([Frame()], "of an unknown kind"),
    "a second hello": ([hello_frame()], "of an unknown kind"),
    "a welcome": ([Frame(welcome=link_pb2.Welcome())], "of an unknown kind"),
    "two frames in one": (
        [field(1, field(6, cancel(1).cancel.SerializeToString()) * 2)],
        "two frames in one",
    ),
    "a number without end": ([b"\x0a" + b"\xff" * 11], "a number of more than 10 bytes"),
    "a number that is cut off": ([raw("cancel", b"\x08\xff")], "it ends within a number"),
    "an id of another type": ([raw("request", field(1, b"1"))], "a field of another type than it has"),
    "a field of an unknown type": ([raw("request", b"\x0f")], "a field of an unknown type"),
    "a field without a number": ([raw("request", b"\x00\x00")], "a field without a number"),
    "more bytes than were announced": (
        [request(attachments=[4]), chunk(1, b"12345")],
        "more bytes than the message announced",
    ),
    "more bytes than were announced, in pieces": (
        [request(attachments=[1, 1, 2]), chunk(1, b"123"), chunk(1, b"45")],
        "more bytes than the message announced",
    ),
    "a chunk that is larger than its message by far": (
        [
            request(attachments=[4]),
            b"\x0a" + varint((1 << 60) + 12) + b"\x6a" + varint((1 << 60) + 2),
            b"\x08\x01\x1a" + varint((1 << 60) - 10),
        ],
        "more bytes than the message announced",
    ),
    "an absurd attachment": ([request(attachments=[1 << 60])], "a message exceeds the limit"),
    "sizes beyond all numbers": (
        [request(attachments=[(1 << 63) + 1, (1 << 63) + 1])],
        "a message exceeds the limit",
    ),
    "too many attachments": ([request(attachments=[0] * 65537)], "more than 65536 attachments"),
    "far too many attachments": (
        [raw("request", b"\x08\x01" + field(6, bytes(16 << 20)))],
        "too many numbers",
    ),
    "an id that comes twice": (
        [request(5, attachments=[1]), request(5, attachments=[1])],
        "a request that arrives twice at once",
    ),
    "id 0": ([request(0)], "a request without an id"),
    "too large a frame": ([request(1, bytes(70 << 20))], "a frame of 73400"),
    "too large a body": ([request(1, bytes((64 << 20) + 1))], "a message body of 67108865 bytes exceeds"),
    "a frame that says it is too large": ([b"\x0a" + varint(1 << 60) + b"\x1a"], "exceeds the limit"),
    "a response to nothing": (
        [Frame(response=link_pb2.Response(id=77, body=b"for nobody"))],
        "a response to a request that was not sent",
    ),
    "a response to nothing, with attachments": (
        [Frame(response=link_pb2.Response(id=78, attachments=[1, 2], body=b"for nobody"))],
        "a response to a request that was not sent",
    ),
    "a response without an outcome": (
        [Frame(response=link_pb2.Response(id=77))],
        "a response without an outcome",
    ),
    "an acknowledgement of a response that was not sent": (
        [together(cancel(1), acknowledge(1))],
        "an acknowledgement of a response that was not sent",
    ),
    "a goodbye that is no error": ([raw("goodbye", field(1, b"\xff"))], "could not be handled"),
}

# The same, of what only goes through shared memory.
NOT_SHARED: Breaks = {
    f"{name} without shared memory": ([frame], "a frame about shared memory, where there is none")
    for name, frame in {
        "a segment": Frame(segment=link_pb2.Segment(id=1, size=1 << 17)),
        "something placed": placed(1, 16),
        "a segment returned": returned(1),
        "a segment freed": freed(1),
    }.items()
}

SHARED: Breaks = {
    "a segment without a descriptor": (
        [Frame(segment=link_pb2.Segment(id=1, size=1 << 17))],
        "without its descriptor",
    ),
    "a segment that may shrink": ([segment(descriptor=UNSEALED)], "is not 131072 bytes of sealed memory"),
    "a segment that may grow": ([segment(descriptor=MAY_GROW)], "is not 131072 bytes of sealed memory"),
    "a segment that is no memory": ([segment(descriptor=NULL)], "is not 131072 bytes of sealed memory"),
    "a segment shorter than it says": ([segment(size=1 << 30)], "is not 1073741824 bytes of sealed memory"),
    "a segment longer than it says": ([segment(size=1)], "is not 1 bytes of sealed memory"),
    "a segment without a size": ([segment(size=0)], "is not 0 bytes of sealed memory"),
    "a segment that is known": ([segment(), segment()], "is one too many, or known already"),
    "more descriptors than frames can have": (
        [WithDescriptors(frames.envelope(cancel(1)), [NULL] * 200)],
        "too many descriptors at once",
    ),
    "something placed nowhere": ([placed(7, 16)], "does not fit in segment 7"),
    "something placed beyond its segment": (
        [segment(), request(attachments=[(1 << 17) + 1]), placed(1, (1 << 17) + 1)],
        "an attachment of 131073 bytes does not fit in segment 1",
    ),
    "nothing placed": (
        [segment(), request(attachments=[0, 1]), placed(1, 0)],
        "an attachment of 0 bytes does not fit in segment 1",
    ),
    "something placed of another size": (
        [segment(), request(attachments=[16, 16]), placed(1, 32)],
        "an attachment of another size than the message announced",
    ),
    "something placed into the middle of an attachment": (
        [segment(), request(attachments=[16, 16]), chunk(1, b"1"), placed(1, 16)],
        "an attachment begins before the one before it is complete",
    ),
    "something placed where something else is": (
        [segment(), request(attachments=[16, 16, 16]), placed(1, 16), placed(1, 16)],
        "segment 1 was filled while it was in use",
    ),
    "a segment freed that is in use": (
        [segment(), request(attachments=[16, 16]), placed(1, 16), freed(1)],
        "segment 1 was freed, but is in use",
    ),
    "a segment freed twice": ([segment(), freed(1), freed(1)], "segment 1 was freed, but is in use, or not"),
    "a segment returned that was not sent": ([returned(1)], "segment 1 was returned, but is not in use"),
}

KINDS: dict[str, Breaks] = {
    "grpc": {**BREAKS, **NOT_SHARED},
    "tcp": {**BREAKS, **NOT_SHARED},
    "unix": {**BREAKS, **SHARED},
}
"""What a link may go over, and what breaks it there."""

# What fails one request: (body, attachments, code).
FAILS: dict[str, tuple[bytes, list[bytes], Code.Code]] = {
    "no protobuf": (b"\xff\xff\xff", [], Code.CODE_MALFORMED),
    "a length that lies": (b"\x0a\xff\xff\xff\xff\x0f", [], Code.CODE_MALFORMED),
    "10,000 levels": (nested(10_000), [], Code.CODE_MALFORMED),
    "33 levels": (nested(33), [], Code.CODE_MALFORMED),
    "an unknown dtype": (call(Tensor(dtype=99, shape=[4])), [], Code.CODE_MALFORMED),  # type: ignore[arg-type]
    "no dtype": (call(Tensor(shape=[4])), [], Code.CODE_MALFORMED),
    "a shape beyond the storage": (call(Tensor(dtype=F32, shape=[5])), [], Code.CODE_MALFORMED),
    "a negative size": (call(Tensor(dtype=F32, shape=[-4])), [], Code.CODE_MALFORMED),
    "an absurd shape": (call(Tensor(dtype=F32, shape=[1 << 62, 1 << 62])), [], Code.CODE_MALFORMED),
    "strides beyond the storage": (
        call(Tensor(dtype=F32, shape=[2, 2], strides=[1 << 40, 1])),
        [],
        Code.CODE_MALFORMED,
    ),
    "an offset beyond the storage": (
        call(Tensor(dtype=F32, shape=[4], offset=1 << 60)),
        [],
        Code.CODE_MALFORMED,
    ),
    "no such storage": (call(Tensor(dtype=F32, shape=[4], storage=7)), [], Code.CODE_MALFORMED),
    "a storage shorter than it says": (
        call(storage=Storage(size=16, inline=bytes(8))),
        [],
        Code.CODE_MALFORMED,
    ),
    "a storage longer than it says": (
        call(storage=Storage(size=16, inline=bytes(32))),
        [],
        Code.CODE_MALFORMED,
    ),
    "an attachment that is not there": (attachment(), [], Code.CODE_MALFORMED),
    "an attachment shorter than it says": (attachment(), [bytes(8)], Code.CODE_MALFORMED),
    "an attachment longer than it says": (attachment(), [bytes(32)], Code.CODE_MALFORMED),
    "an attachment of nothing": (attachment(), [b""], Code.CODE_MALFORMED),
    "a storage without end": (attachment(1 << 60), [bytes(8)], Code.CODE_MALFORMED),
    "a device whose support is not there": (
        autograd_pb2.ForwardWithAutogradRequest.FromString(call()).SerializeToString()
        + autograd_pb2.ForwardWithAutogradRequest(devices=["hpu"]).SerializeToString(),
        [],
        Code.CODE_INVALID_DEVICE_MAP,
    ),
    "a set of integers of one hash": (set_of_one_hash(60_000), [], Code.CODE_MALFORMED),
    "the name of no keyword argument": (
        autograd_pb2.ForwardWithAutogradRequest(
            function="echo", kwargs={"x": value_pb2.Value(integer=1)}, kwarg_names=["y"]
        ).SerializeToString(),
        [],
        Code.CODE_MALFORMED,
    ),
    "no function": (b"", [], Code.CODE_UNKNOWN_FUNCTION),
}

HELLOS: dict[str, tuple[bytes, str]] = {
    "no protobuf": (b"\xff\xff", "no gradwire Envelope"),
    "a cut off envelope": (frames.envelope(hello_frame())[:-1], "no gradwire Envelope"),
    "nothing": (b"", "must start with Hello"),
    "a request": (frames.envelope(request()), "must start with Hello"),
    "a chunk": (frames.envelope(chunk(1, b"1")), "must start with Hello"),
    "two frames": (together(hello_frame(), hello_frame()), "must start with Hello"),
    "another protocol": (
        frames.envelope(hello_frame(protocol=99)),
        "protocol 99 is not spoken here, only 3",
    ),
    "the protocol before": (
        frames.envelope(hello_frame(protocol=2)),
        "protocol 2 is not spoken here, only 3",
    ),
    "no peer": (frames.envelope(hello_frame(peer=0)), "must name a peer"),
    "no session": (frames.envelope(hello_frame(session=0)), "must name a peer"),
    "the id of another peer": (frames.envelope(hello_frame(peer=5)), "does not prove to come from it"),
    "no secret": (frames.envelope(hello_frame(peer=5, secret=b"")), "does not prove to come from it"),
}


def break_link(address: str, kind: str, name: str) -> None:
    sent, complaint = KINDS[kind][name]
    with RawLink(address, kind=kind).welcome() as link:
        for data in sent:
            link.send(data)
        assert complaint in link.farewell().message


def fail_request(address: str, kind: str, name: str) -> None:
    body, attachments, code = FAILS[name]
    with RawLink(address, kind=kind).welcome() as link:
        link.send(request(1, body, attachments=map(len, attachments)))
        for content in attachments:
            link.send(chunk(1, content))
        response = link.respond()
        assert response.error.code == code, response
        assert response.error.message
        # The link goes on.
        link.send(ping(2))
        assert link.respond().id == 2


def refuse_hello(address: str, kind: str, name: str) -> None:
    hello, complaint = HELLOS[name]
    with RawLink(address, hello, kind) as link:
        error = link.farewell()
        assert complaint in error.message


def fail_unary(address: str, kind: str, name: str) -> None:
    body = FAILS[name][0]
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(FORWARD)(body, timeout=SECONDS)
    expected = grpc.StatusCode.NOT_FOUND if name == "no function" else grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.code() is expected
    assert caught.value.details()


ATTACKS: list[tuple[Callable[[str, str, str], None], str, str]] = [
    *((break_link, kind, name) for kind, breaks in KINDS.items() for name in breaks),
    *((fail_request, kind, name) for kind in KINDS for name in FAILS),
    *((refuse_hello, "grpc", name) for name in HELLOS),
    *((fail_unary, "grpc", name) for name in FAILS),
]


@pytest.mark.parametrize(
    ("attack", "kind", "name"), ATTACKS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_clear_error_and_others_notice_nothing(
    workers: Workers, attack: Callable[[str, str, str], None], kind: str, name: str
) -> None:
    event = f"{attack.__name__} {kind} {name}"
    with gw.connect(workers.a) as bystander:
        link, process = bystander._link, bystander.process()
        waiting = bystander.call_async("happened", event)
        attack(workers.a, kind, name)
        bystander.signal(event)
        assert waiting.result(SECONDS) is True
        assert bystander._link is link
        assert bystander.process() == process


@pytest.fixture
def counted() -> list[int]:
    """One for each call of the worker's `count`."""
    return []


@pytest.fixture
def gate() -> threading.Event:
    """What the worker's `wait` waits for."""
    return threading.Event()


@pytest.fixture
def worker(counted: list[int], gate: threading.Event) -> Iterator[gws.Worker]:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def echo(x: object) -> object:
        return x

    def count() -> int:
        counted.append(1)
        return len(counted)

    def wait() -> None:
        assert gate.wait(SECONDS)

    def ask(x: torch.Tensor) -> object:
        return gw.caller().call("answer", x.detach())

    def descend(x: torch.Tensor) -> torch.Tensor | None:
        leaf = x.detach().requires_grad_()
        gw.caller().call("answer", leaf).sum().backward()
        return leaf.grad

    with gws.Worker(double, echo, count, wait, ask, descend, lease=0.1) as worker:
        yield worker


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def wait_until_nothing_is_kept(worker: gws.Worker) -> None:
    """Of clients, but for one's lease."""
    eventually(lambda: worker._acceptor._accepted == {})
    eventually(lambda: worker._acceptor._budget.used == 0)
    eventually(lambda: worker._scheduler.unfinished == 0)
    eventually(lambda: not native.is_used())


def statistics(worker: gws.Worker) -> dict[str, int]:
    """Those of its only session."""
    (session,) = worker._acceptor.sessions
    with session._lock:
        return session._native.statistics()


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:hostile")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_kept_of_hostile_clients(worker: gws.Worker) -> None:
    for kind in KINDS:  # so that the worker listens for all of them
        break_link(worker.address, kind, "id 0")
    wait_until_nothing_is_kept(worker)
    before = descriptors()
    for attack, kind, name in ATTACKS:
        attack(worker.address, kind, name)
    wait_until_nothing_is_kept(worker)
    eventually(lambda: mapped_segments() == 0)
    eventually(lambda: descriptors() <= before)
    with gw.connect(worker.address) as handle:
        assert handle.double(21) == 42


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_vanishes_amid_a_transfer_is_forgotten(worker: gws.Worker, kind: str) -> None:
    with RawLink(worker.address, kind=kind).welcome() as link:
        link.send(request(1, attachment(1 << 30), attachments=[1 << 30, 1]))
        link.send(chunk(1, bytes(1 << 20)))
        eventually(lambda: statistics(worker)["arrived_bytes"] == 1 << 20)
        assert worker._acceptor._budget.used == (1 << 30) + 1
    wait_until_nothing_is_kept(worker)


def test_a_client_that_vanishes_with_its_segment_in_use_is_forgotten(worker: gws.Worker) -> None:
    with RawLink(worker.address, kind="unix").welcome() as link:
        link.send(segment())
        link.send(request(1, attachment(1 << 17), attachments=[1 << 17, 1]))
        link.send(placed(1, 1 << 17))
        eventually(lambda: statistics(worker)["arrived_bytes"] == 1 << 17)
        assert mapped_segments() == 1
    wait_until_nothing_is_kept(worker)
    eventually(lambda: mapped_segments() == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_early_cancellations_cost_nothing(
    worker: gws.Worker, kind: str, counted: list[int]
) -> None:
    count = autograd_pb2.ForwardWithAutogradRequest(function="count").SerializeToString()
    with RawLink(worker.address, kind=kind).welcome() as link:
        for id in range(1, 5001):
            link.send(cancel(id))
        for id in range(1, 5001):
            link.send(request(id, count, attachments=[16]))  # never run, and never waited for
        link.send(ping(5001))
        for id in range(1, 5001):
            response = link.respond()
            assert (response.id, response.error.code) == (id, Code.CODE_CANCELLED)
        assert link.respond().id == 5001
        assert statistics(worker)["arrived_bytes"] == statistics(worker)["quota_bytes"] == 0
        for id in range(1, 5002):
            link.send(acknowledge(id))
        eventually(lambda: statistics(worker)["inbound_calls"] == 0)
        eventually(lambda: worker._acceptor.sessions[0]._inbound == {})
    assert counted == []


@pytest.mark.parametrize("frame", [cancel, ping], ids=["cancellations", "requests"])
def test_responses_that_are_never_acknowledged_end_the_link(
    worker: gws.Worker, monkeypatch: pytest.MonkeyPatch, frame: Callable[[int], Frame]
) -> None:
    monkeypatch.setattr(native, "Link", partial(native.Link, max_inbound_calls=100))
    with RawLink(worker.address).welcome() as link:
        for id in range(1, 200):
            link.send(frame(id))
        error = link.farewell()
        assert error.code == Code.CODE_PROTOCOL
        assert "more than 100 requests whose responses were not acknowledged" in error.message


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_comes_again_runs_once(worker: gws.Worker, kind: str, counted: list[int]) -> None:
    again = request(7, autograd_pb2.ForwardWithAutogradRequest(function="count").SerializeToString())
    with RawLink(worker.address, kind=kind).welcome() as link:
        link.send(together(again, again))
        assert link.respond().id == 7
        link.send(again)
        link.send(acknowledge(7))
        link.send(again)
        link.send(ping(6))  # taken for one that was responded to
        link.send(ping(8))
        assert link.respond().id == 8
    assert counted == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_no_message_are_skipped(worker: gws.Worker, kind: str) -> None:
    with RawLink(worker.address, kind=kind).welcome() as link:
        link.send(chunk(99, bytes(1 << 20)))
        link.send(chunk(1, b"before its request"))
        link.send(chunk(1, b"of a response", of_response=True))
        link.send(chunk(1, b""))
        link.send(chunk((1 << 64) - 1, b"1"))
        link.send(request(1, attachment(), attachments=[16]))
        link.send(chunk(2, bytes(16)))
        link.send(chunk(1, bytes(16), of_response=True))
        link.send(ping(2))
        assert link.respond().id == 2
        assert statistics(worker)["arrived_bytes"] == 0
        link.send(chunk(1, bytes(16)))
        response = link.respond()
        assert (response.id, response.WhichOneof("outcome")) == (1, "body"), response
        link.send(chunk(1, bytes(16)))  # it has them all
        link.send(ping(3))
        assert link.respond().id == 3


def test_what_is_placed_for_no_message_is_given_back(worker: gws.Worker) -> None:
    with RawLink(worker.address, kind="unix").welcome() as link:
        link.send(segment())
        for of_response in (False, True):
            link.send(placed(1, 16, 99, of_response=of_response))
            link.send(ping(1 + of_response))
            kinds = [(frame.WhichOneof("kind"), frame) for frame in itertools.islice(link.receive(), 2)]
            (news,) = [frame for kind, frame in kinds if kind == "returned"]
            assert news.returned.segments == [1]
        link.send(freed(1))
        eventually(lambda: mapped_segments() == 0)


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan, -1.0, 1e300, 1e18, 1e10])
def test_a_timeout_that_is_none_is_no_timeout(worker: gws.Worker, seconds: float) -> None:
    with RawLink(worker.address).welcome() as link:
        link.send(request(1, call(), timeout_seconds=seconds))
        response = link.respond()
        assert (response.id, response.WhichOneof("outcome")) == (1, "body"), response


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_after_a_socket_was_taken_nothing_else_is_read(
    worker: gws.Worker, kind: str, counted: list[int]
) -> None:
    count = autograd_pb2.ForwardWithAutogradRequest(function="count").SerializeToString()
    with RawLink(worker.address, kind=kind).welcome() as link:
        link.send_to_stream(frames.envelope(request(1, count)))
        link.send_to_stream(b"\xff\xff\xff")
        with link.redeem() as again:  # the token was good once
            assert again.recv(1) == b""
        link.send(ping(1))
        assert link.respond().id == 1
    assert counted == []


@pytest.mark.parametrize("more", [b"\xff\xff\xff", frames.goodbye()], ids=["garbage", "a goodbye"])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_session_that_ends_while_the_socket_is_taken_harms_no_other(
    worker: gws.Worker, kind: str, more: bytes
) -> None:
    hello = {"same_host": kind == "unix", "direct": kind == "tcp"}
    for _ in range(50):
        with RawLink(worker.address, frames.envelope(hello_frame(**hello))).welcome() as link:
            with link.redeem(more) as connection:
                assert connection.recv(1) == b"\x01"
    with gw.connect(worker.address) as handle:
        assert handle.double(21) == 42
    wait_until_nothing_is_kept(worker)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_after_the_stream_was_taken_no_socket_is_given(worker: gws.Worker, kind: str) -> None:
    hello = hello_frame(same_host=kind == "unix", direct=kind == "tcp")
    with RawLink(worker.address, frames.envelope(hello)).welcome() as link:
        assert link.offer.HasField("same_host" if kind == "unix" else "direct")
        link.send(frames.NOTHING)
        link.send(ping(1))
        assert link.respond().id == 1
        with link.redeem() as late:
            assert late.recv(1) == b""
        link.send(ping(2))
        assert link.respond().id == 2


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_client_that_never_chooses_is_forgotten(worker: gws.Worker, kind: str) -> None:
    hello = hello_frame(same_host=kind == "unix", direct=kind == "tcp")
    with RawLink(worker.address, frames.envelope(hello)).welcome() as link:
        (session,) = worker._acceptor.sessions
        assert not session.connected
    eventually(lambda: all(not listener._offers for listener in worker._acceptor._listeners.values()))
    with link.redeem() as late:  # its offer ends with the stream
        assert late.recv(1) == b""
    wait_until_nothing_is_kept(worker)


def test_a_stream_that_says_nothing_is_cut_off(worker: gws.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        acceptor, "call_later", lambda seconds, callback: call_later(min(seconds, 0.2), callback)
    )
    from gradwire.system.timers import call_later

    with grpc.insecure_channel(worker.address) as channel:
        never: queue.SimpleQueue[None] = queue.SimpleQueue()
        open_stream: Any = channel.stream_stream(LINK)
        silent = open_stream(iter(never.get, None), timeout=SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            next(silent)
        assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        never.put(None)


@pytest.mark.parametrize("kind", KINDS)
def test_acknowledgements_and_cancels_out_of_nowhere_are_ignored(worker: gws.Worker, kind: str) -> None:
    with RawLink(worker.address, kind=kind).welcome() as link:
        link.send(acknowledge(1, 2, 1 << 63))
        link.send(acknowledge())
        link.send(ping(1))
        assert link.respond().id == 1
        link.send(cancel(0))
        link.send(cancel(1))
        link.send(acknowledge(1, 1))
        link.send(cancel(1))
        link.send(request(2, b"", 77))
        assert link.respond().error.code == Code.CODE_PROTOCOL


@pytest.mark.parametrize("kind", KINDS)
def test_an_acknowledgement_of_what_is_being_served_does_not_end_it(
    worker: gws.Worker, kind: str, gate: threading.Event
) -> None:
    wait = autograd_pb2.ForwardWithAutogradRequest(function="wait").SerializeToString()
    with RawLink(worker.address, kind=kind).welcome() as link:
        link.send(request(1, wait))
        link.send(acknowledge(1))
        link.send(ping(2))
        assert link.respond().id == 2
        gate.set()
        response = link.respond()
        assert (response.id, response.WhichOneof("outcome")) == (1, "body"), response


def test_a_name_that_is_no_name_is_made_one(worker: gws.Worker) -> None:
    with RawLink(worker.address, frames.envelope(hello_frame(name="\x1b[31m\n" * 1000))).welcome():
        (session,) = worker._acceptor.sessions
        assert session.peer.name.isprintable()
        assert len(session.peer.name) <= 100


def test_an_attempt_that_was_superseded_is_refused(worker: gws.Worker) -> None:
    ids = {"secret": SECRET, "session": 6}
    with RawLink(worker.address, frames.envelope(hello_frame(**ids, attempt=2))).welcome():
        with RawLink(worker.address, frames.envelope(hello_frame(**ids, attempt=2))) as again:
            assert "superseded" in again.farewell().message
        with RawLink(worker.address, frames.envelope(hello_frame(**ids, attempt=1))) as older:
            assert "superseded" in older.farewell().message


@pytest.mark.parametrize("kind", KINDS)
def test_random_bytes_do_no_harm(worker: gws.Worker, kind: str) -> None:
    generator = random.Random(0)
    valid = [
        frames.envelope(frame)
        for frame in (
            request(1, call()),
            request(2, attachment(), attachments=[16]),
            chunk(2, bytes(16)),
            cancel(2),
            acknowledge(1),
            request(3, attachment(), attachments=[16]),
            placed(1, 16, 3),
            returned(1),
            freed(1),
            Frame(response=link_pb2.Response(id=1, body=b"", attachments=[16])),
        )
    ]
    for _ in range(100):
        with RawLink(worker.address, kind=kind).welcome() as link:
            if kind == "unix":
                link.send(segment())
            for data in generator.sample(valid, 5):
                mutated = bytearray(data)
                for _ in range(generator.randrange(3)):
                    mutated[generator.randrange(len(mutated))] = generator.randrange(256)
                link.send(bytes(mutated))
    with gw.connect(worker.address) as handle:
        assert handle.double(21) == 42
    wait_until_nothing_is_kept(worker)
    eventually(lambda: mapped_segments() == 0)


def test_values_that_lie_about_their_type_are_refused(worker: gws.Worker) -> None:
    enum_member = value_pb2.EnumMember(type="os.system", member="x")
    for value, code in (
        (value_pb2.Value(dtype="no_such_dtype"), Code.CODE_MALFORMED),
        (value_pb2.Value(device="no such device"), Code.CODE_MALFORMED),
        # As it is for an honest client whose types the worker does not know.
        (value_pb2.Value(enum_member=enum_member), Code.CODE_TYPE_MISMATCH),
        (value_pb2.Value(record=value_pb2.Record(type="subprocess.Popen")), Code.CODE_TYPE_MISMATCH),
        (value_pb2.Value(array=value_pb2.NumpyArray(dtype="O", shape=[1], storage=0)), Code.CODE_MALFORMED),
        (value_pb2.Value(tensor=3), Code.CODE_MALFORMED),
    ):
        message = autograd_pb2.ForwardWithAutogradRequest(function="echo", args=[value])
        with RawLink(worker.address).welcome() as link:
            link.send(request(1, message.SerializeToString()))
            assert link.respond().error.code == code, value


# -- plans

PLAN = 7
SECRET = bytes(range(32))
PEER = peer_of(SECRET)
"""The id of the hostile peer."""
CONTEXT, MESSAGE = struct.pack("<QQQ", PEER, 3, 0), struct.pack("<QQQ", PEER, 4, 0)


def said(counts: tuple[int, int, int] = (0, 0, 0), flags: int = 1, ids: bytes = b"") -> bytes:
    """What a message in short says of autograd."""
    return struct.pack("<24s24sQIIIB", CONTEXT, MESSAGE, 0, *counts, flags) + ids


def planned_call(plan: int = PLAN, function: str = "double", count: int = 4) -> bytes:
    """A call in full with one tensor that requires grad, and with a plan."""
    tensor = Tensor(dtype=F32, shape=[count], requires_grad=True)
    storage = Storage(size=4 * count, inline=bytes(4 * count))
    message = autograd_pb2.ForwardWithAutogradRequest.FromString(call(tensor, storage))
    message.function, message.plan = function, plan
    message.autograd.context.peer = message.autograd.message.peer = PEER
    message.autograd.context.number, message.autograd.message.number = 3, 4
    return message.SerializeToString()


def short_call(
    plan: int = PLAN, known: int = 0, autograd: bytes = said(), content: bytes = bytes(16)
) -> bytes:
    return struct.pack("<BIH", 0, plan, known) + autograd + content


def short_gradients(
    message: bytes,
    slots: int = 1,
    repeated: int = 0,
    autograd: bytes = said(flags=0),
    content: bytes = bytes(16),
    flags: int = 1,
) -> bytes:
    """Gradients for a message with one tensor."""
    head = struct.pack("<BB24s24s", 0, flags, b"\x03" * 24, message)
    return head + autograd + bytes([slots, repeated]) + content


MOST = 2**32 - 1
SHORT_CALLS: dict[str, tuple[bytes, list[bytes]]] = {
    "a zero byte": (b"\0", []),
    "zero bytes": (bytes(100), []),
    "half a head": (short_call()[:5], []),
    "an unknown plan": (short_call(8), []),
    "the largest number of a plan": (short_call(MOST), []),
    "no metadata": (short_call(autograd=b"", content=b""), []),
    "half its metadata": (short_call()[:40], []),
    "4 billion ids": (short_call(autograd=said((MOST, 0, 0))), []),
    "12 billion ids": (short_call(autograd=said((MOST, MOST, MOST), flags=3)), []),
    "an unknown flag of its metadata": (short_call(autograd=said(flags=1 | 4)), []),
    "all flags of its metadata": (short_call(autograd=said(flags=255, ids=bytes(24))), []),
    "one id too few": (short_call(autograd=said((0, 1, 0))), []),
    "one id too many": (short_call(autograd=said(ids=bytes(24))), []),
    "a segment handle that is not there": (short_call(autograd=said(flags=3), content=b""), []),
    "no tensor": (short_call(content=b""), []),
    "a tensor that is a byte short": (short_call(content=bytes(15)), []),
    "a tensor that is a byte long": (short_call(content=bytes(17)), []),
    "an attachment too many": (short_call(), [bytes(16)]),
    "an attachment instead": (short_call(content=b""), [bytes(16)]),
    "an empty attachment": (short_call(), [b""]),
}
SHORT_GRADIENTS: dict[str, tuple[Callable[[bytes], bytes], list[bytes]]] = {
    "a zero byte": (lambda _: b"\0", []),
    "half a head": (lambda message: short_gradients(message)[:40], []),
    "half its metadata": (lambda message: short_gradients(message)[:60], []),
    "no such message": (lambda _: short_gradients(b"\x09" * 24), []),
    "an unknown flag": (lambda message: short_gradients(message, flags=1 | 8), []),
    "all flags": (lambda message: short_gradients(message, flags=255), []),
    "an unknown flag of its metadata": (
        lambda message: short_gradients(message, autograd=said(flags=4)),
        [],
    ),
    "a slot beyond": (lambda message: short_gradients(message, 2), []),
    "all slots": (lambda message: short_gradients(message, 255), []),
    "no slots": (lambda message: short_gradients(message, content=b"")[:-1], []),
    "a repeated element that is too long": (lambda message: short_gradients(message, 1, 1), []),
    "a gradient that is a byte short": (lambda message: short_gradients(message, content=bytes(15)), []),
    "a gradient that is a byte long": (lambda message: short_gradients(message, content=bytes(17)), []),
    "a gradient for no slot": (lambda message: short_gradients(message, 0), []),
    "only a slot that repeats": (lambda message: short_gradients(message, 0, 1), []),
    "an attachment too many": (short_gradients, [bytes(16)]),
    "an attachment instead": (lambda message: short_gradients(message, content=b""), [bytes(16)]),
    "4 billion releases": (
        lambda message: short_gradients(message, autograd=said((0, 0, MOST), flags=0)),
        [],
    ),
}


class Numbered:
    """Sends requests over a raw link, each with the next number. Those of the worker get empty responses."""

    def __init__(self, link: RawLink) -> None:
        self._link = link
        self._ids = itertools.count(1)

    def __call__(
        self,
        body: bytes,
        attachments: Sequence[bytes] = (),
        method: Any = link_pb2.METHOD_FORWARD_WITH_AUTOGRAD,
    ) -> link_pb2.Response:
        id = next(self._ids)
        self._link.send(request(id, body, method, attachments=map(len, attachments)))
        for content in attachments:
            self._link.send(chunk(id, content))
        for frame in self._link.receive():
            if frame.WhichOneof("kind") == "request":
                self._link.send(Frame(response=link_pb2.Response(id=frame.request.id, body=b"")))
            elif frame.WhichOneof("kind") == "response":
                assert frame.response.id == id
                self._link.send(acknowledge(id))
                return frame.response
            else:
                assert frame.WhichOneof("kind") != "goodbye", frame
        raise AssertionError("the stream ended without a response")

    def keep_plan(self) -> bytes:
        """Has the plan kept. The message of the results."""
        response = self(planned_call())
        full = in_full(response)
        assert full.plan_is_kept
        assert full.result_number == 1
        message = full.autograd.message
        return struct.pack("<QQQ", message.peer, message.number, message.key)


def in_full(response: link_pb2.Response) -> autograd_pb2.ForwardWithAutogradResponse:
    return autograd_pb2.ForwardWithAutogradResponse.FromString(response.body)


def refused(response: link_pb2.Response) -> bool:
    assert response.error.message
    return response.error.code in (Code.CODE_MALFORMED, Code.CODE_NOT_FOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_short_that_are_forged_are_refused(worker: gws.Worker, kind: str) -> None:
    with (
        gw.connect(worker.address) as bystander,
        RawLink(worker.address, kind=kind, secret=SECRET).welcome() as raw_link,
    ):
        send = Numbered(raw_link)
        for body, attachments in SHORT_CALLS.values():
            assert refused(send(body, attachments))  # before there is a plan
        send.keep_plan()
        for name, (body, attachments) in SHORT_CALLS.items():
            assert refused(send(body, attachments)), name
        # The link and the plan are as they were.
        assert send(short_call(known=2**16 - 1)).body.startswith(b"\0\x80\1\0")
        assert bystander.double(21) == 42
    wait_until_nothing_is_kept(worker)
    eventually(lambda: not list(worker._peer.engine.container.contexts()))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_short_that_are_forged_are_refused(worker: gws.Worker, kind: str) -> None:
    propagate = link_pb2.METHOD_PROPAGATE_GRADIENTS
    with RawLink(worker.address, kind=kind, secret=SECRET).welcome() as raw_link:
        send = Numbered(raw_link)
        message = send.keep_plan()
        for name, (body, attachments) in SHORT_GRADIENTS.items():
            assert refused(send(body(message), attachments, propagate)), name
        response = send(short_gradients(message), method=propagate)
        assert response.body.startswith(b"\0")
        assert response.body.endswith(bytes(16))
    wait_until_nothing_is_kept(worker)


def test_messages_in_short_that_are_changed_at_random_do_no_harm(worker: gws.Worker) -> None:
    chance = random.Random(7)
    codes = set()
    with RawLink(worker.address, kind="unix", secret=SECRET).welcome() as raw_link:
        send = Numbered(raw_link)
        message = send.keep_plan()
        for _ in range(1000):
            counts, flags = [0, 0, 0], chance.choice([0, 1, 1, 2, 3])
            counts[chance.randrange(3)] += chance.randrange(3)
            ids = b"".join(chance.choice([message, MESSAGE]) for _ in range(sum(counts) + flags // 2))
            autograd = said((counts[0], counts[1], counts[2]), flags, ids)
            if chance.random() < 0.5:
                method, body = link_pb2.METHOD_FORWARD_WITH_AUTOGRAD, short_call(known=1, autograd=autograd)
            else:
                method = link_pb2.METHOD_PROPAGATE_GRADIENTS
                body = short_gradients(message, chance.randrange(3), chance.randrange(2), autograd)
            at = chance.randrange(len(body))
            if chance.random() < 0.7:
                removed = chance.choice([0, 1, 16])
                body = body[:at] + chance.randbytes(chance.choice([0, 1, 16])) + body[at + removed :]
            response = send(body, method=method)
            codes.add(response.error.code)
            if response.error.code == Code.CODE_NOT_FOUND:
                message = send.keep_plan()
    assert codes == {Code.CODE_UNSPECIFIED, Code.CODE_MALFORMED, Code.CODE_NOT_FOUND}
    wait_until_nothing_is_kept(worker)
    eventually(lambda: not list(worker._peer.engine.container.contexts()))


def test_a_plan_keeps_its_meaning_and_one_link(worker: gws.Worker) -> None:
    with (
        RawLink(worker.address, secret=SECRET).welcome() as one,
        RawLink(worker.address, secret=SECRET).welcome() as other,
    ):
        send = Numbered(one)
        send.keep_plan()
        again = in_full(send(planned_call(count=1, function="echo")))
        assert again.result_number == 2
        doubled = send(short_call(content=struct.pack("<4f", 1, 2, 3, 4), known=1)).body
        assert struct.unpack("<4f", doubled[-16:]) == (2, 4, 6, 8)
        assert refused(send(short_call(content=bytes(4))))
        assert refused(Numbered(other)(short_call()))


def test_a_draining_worker_refuses_calls_in_short(worker: gws.Worker) -> None:
    with RawLink(worker.address, secret=SECRET).welcome() as raw_link:
        send = Numbered(raw_link)
        send.keep_plan()
        worker._servicer.draining = True
        for body in (short_call(), short_call(8), b"\0"):
            assert send(body).error.code == Code.CODE_UNAVAILABLE


def test_a_client_that_has_millions_of_plans_kept_takes_little_memory(worker: gws.Worker) -> None:
    kept = 0
    with RawLink(worker.address, kind="unix").welcome() as raw_link:
        send = Numbered(raw_link)
        for number in range(1, 20_000):
            message = autograd_pb2.ForwardWithAutogradRequest(function="count", plan=number)
            response = send(message.SerializeToString())
            if not in_full(response).plan_is_kept:
                break
            kept += 1
        (session,) = worker._acceptor.sessions
        assert 1000 < kept == len(session.plans._received) < 10_000


def short_response(
    number: int = 1, autograd: bytes = said(flags=0), content: bytes = bytes(16), flags: int = 0x80
) -> bytes:
    return struct.pack("<BBH", 0, flags, number) + autograd + content


def full_response(**fields: Any) -> bytes:
    message = autograd_pb2.ForwardWithAutogradResponse(plan_is_kept=True, **fields)
    message.result.tensor = 0
    message.tensors.tensors.append(Tensor(dtype=F32, shape=[4]))
    message.tensors.storages.append(Storage(size=16, inline=bytes(16)))
    return message.SerializeToString()


SHORT_RESPONSES: dict[str, tuple[bytes, list[bytes]]] = {
    "a zero byte": (b"\0", []),
    "zero bytes": (bytes(100), []),
    "no metadata": (short_response(autograd=b"", content=b""), []),
    "12 billion ids": (short_response(autograd=said((MOST, MOST, MOST), flags=3)), []),
    "an unknown flag": (short_response(flags=0x80 | 2), []),
    "a flag of another method": (short_response(flags=0x80 | 1), []),
    "an unknown flag of its metadata": (short_response(autograd=said(flags=4)), []),
    "no result": (short_response(0), []),
    "an unknown result": (short_response(2), []),
    "the largest number of a result": (short_response(2**16 - 1), []),
    "a result that is a byte short": (short_response(content=bytes(15)), []),
    "a result that is a byte long": (short_response(content=bytes(17)), []),
    "an attachment too many": (short_response(), [bytes(16)]),
    "an attachment instead": (short_response(content=b""), [bytes(16)]),
    "the 17th result": (full_response(result_number=17), []),
    "the 4 billionth result": (full_response(result_number=MOST), []),
}


Answer = Callable[[link_pb2.Request], tuple[bytes, Sequence[bytes]]]


class Called:
    """Has the worker call back over a raw link, and responds by hand."""

    def __init__(self, link: RawLink) -> None:
        self._link = link
        self._ids = itertools.count(1)
        self.last_request = b""

    def __call__(self, answer: Answer, function: str = "ask") -> link_pb2.Response:
        """The response to a call of a function, whose own requests get these answers."""
        id = next(self._ids)
        self._link.send(request(id, planned_call(PLAN, function)))
        for frame in self._link.receive():
            if frame.WhichOneof("kind") == "request":
                self.last_request = frame.request.body
                number = frame.request.id
                body, attachments = answer(frame.request)
                response = link_pb2.Response(id=number, body=body, attachments=map(len, attachments))
                self._link.send(Frame(response=response))
                for content in attachments:
                    self._link.send(chunk(number, content, of_response=True))
            elif frame.WhichOneof("kind") == "response":
                assert frame.response.id == id
                return frame.response
        raise AssertionError("the stream ended without a response")


@pytest.mark.parametrize("kind", KINDS)
def test_responses_in_short_that_are_forged_are_refused(worker: gws.Worker, kind: str) -> None:
    with (
        gw.connect(worker.address) as bystander,
        RawLink(worker.address, kind=kind, secret=SECRET).welcome() as raw_link,
    ):
        ask = Called(raw_link)
        # To a request in full, the first without a plan, the second with one.
        assert refused(ask(lambda _: (short_response(), [])))
        assert autograd_pb2.ForwardWithAutogradRequest.FromString(ask.last_request).plan == 0
        assert refused(ask(lambda _: (short_response(), [])))
        assert autograd_pb2.ForwardWithAutogradRequest.FromString(ask.last_request).plan == 1
        assert not ask(lambda _: (full_response(result_number=1), [])).error.message
        for name, (body, attachments) in SHORT_RESPONSES.items():
            assert refused(ask(partial(lambda answer, _: answer, (body, attachments)))), name
            assert ask.last_request.startswith(b"\0\1\0\0\0\1\0"), name
        result = in_full(ask(lambda _: (short_response(content=b"\1" * 16), [])))
        assert result.tensors.storages[0].inline == b"\1" * 16
        assert bystander.double(21) == 42
    wait_until_nothing_is_kept(worker)
    eventually(lambda: not list(worker._peer.engine.container.contexts()))


def contributions(
    *heads: bytes, count: int | None = None, content: bytes = bytes(16), flags: int = 0x80
) -> bytes:
    number = len(heads) if count is None else count
    return short_response(number, content=b"".join(heads) + content, flags=flags)


CONTRIBUTIONS: dict[str, tuple[Callable[[bytes], bytes], list[bytes]]] = {
    "a zero byte": (lambda _: b"\0", []),
    "no head": (lambda _: contributions(count=1, content=b""), []),
    "65,535 messages": (lambda message: contributions(head_of(message), count=2**16 - 1), []),
    "an unknown flag": (lambda message: contributions(head_of(message), flags=0x80 | 2), []),
    "a message that nobody sent": (lambda _: contributions(head_of(bytes(24))), []),
    "a message twice": (lambda message: contributions(head_of(message), head_of(message)), []),
    "a slot beyond": (lambda message: contributions(head_of(message, 2)), []),
    "a repeated element that is too long": (lambda message: contributions(head_of(message, 1, 1)), []),
    "a gradient that is a byte short": (
        lambda message: contributions(head_of(message), content=bytes(15)),
        [],
    ),
    "an attachment too many": (lambda message: contributions(head_of(message)), [bytes(16)]),
}


def head_of(message: bytes, slots: int = 1, repeated: int = 0) -> bytes:
    return message + bytes([slots, repeated])


@pytest.mark.parametrize("kind", KINDS)
def test_contributions_in_short_that_are_forged_are_refused(worker: gws.Worker, kind: str) -> None:
    arguments: list[bytes] = []

    def answer(forge: Callable[[bytes], bytes], attachments: list[bytes], request: link_pb2.Request) -> Any:
        """The result of a call depends on its argument, whose gradients are forged."""
        if request.method == link_pb2.METHOD_PROPAGATE_GRADIENTS:
            assert request.body.startswith(b"\0")
            return forge(arguments.pop()), attachments
        assert request.method == link_pb2.METHOD_FORWARD_WITH_AUTOGRAD
        message = autograd_pb2.ForwardWithAutogradResponse.FromString(full_response())
        message.tensors.tensors[0].requires_grad = True
        message.autograd.message.peer, message.autograd.message.number = PEER, 9
        if request.body.startswith(b"\0"):
            arguments.append(request.body[7 + 24 : 7 + 48])
        else:
            came = autograd_pb2.ForwardWithAutogradRequest.FromString(request.body).autograd
            arguments.append(struct.pack("<QQQ", came.message.peer, came.message.number, came.message.key))
        message.autograd.context.CopyFrom(autograd_pb2.ContextId(peer=PEER, number=3))
        peer, number, key = struct.unpack("<QQQ", arguments[-1])
        message.autograd.depends_on.add(peer=peer, number=number, key=key)
        return message.SerializeToString(), []

    def right(message: bytes) -> bytes:
        return contributions(head_of(message), content=b"\1" * 16)

    with RawLink(worker.address, kind=kind, secret=SECRET).welcome() as raw_link:
        descend = Called(raw_link)
        for name, (forge, attachments) in CONTRIBUTIONS.items():
            assert refused(descend(partial(answer, forge, attachments), "descend")), name
            arguments.clear()
        result = in_full(descend(partial(answer, right, []), "descend"))
        assert result.tensors.storages[0].inline == b"\1" * 16
    wait_until_nothing_is_kept(worker)
