"""Whatever is sent to a worker: a clear error, the worker lives, others notice nothing, nothing leaks."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch
from tests.conftest import Workers

import gradwire as gw
import gradwire_server as gws
from gradwire.proto.v1 import autograd_pb2, link_pb2, tensor_pb2, value_pb2
from gradwire.transport import frames
from gradwire_server.serving import acceptor

SECONDS = 20.0
LINK = "/gradwire.v1.Worker/Link"
FORWARD = "/gradwire.v1.Worker/ForwardWithAutograd"
Frame = link_pb2.Frame
Code = link_pb2.Error


class RawLink:
    """The frames of a link, written by hand."""

    def __init__(
        self, address: str, hello: bytes | None = None, role: int = link_pb2.Hello.ROLE_CONTROL
    ) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(address, options=options)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        open_stream: Any = self._channel.stream_stream(LINK)
        self._call = open_stream(iter(self._outgoing.get, None), timeout=SECONDS)
        self._incoming = self._parsed()
        self.send(hello_frame(role=role) if hello is None else hello)

    def send(self, data: bytes | Frame) -> None:
        self._outgoing.put(frames.envelope(data) if isinstance(data, Frame) else data)

    def _parsed(self) -> Iterator[Frame]:
        for data in self._call:
            yield from frames.parse(data)

    def receive(self) -> Iterator[Frame]:
        """The frames that come. Several may come at once: whoever asks next goes on where this one stops."""
        return self._incoming

    def welcome(self) -> RawLink:
        assert next(self.receive()).WhichOneof("kind") == "welcome"
        return self

    def farewell(self) -> link_pb2.Error:
        """The error with which the other end says goodbye."""
        for frame in self.receive():
            if frame.WhichOneof("kind") == "goodbye":
                return frame.goodbye.error
        raise AssertionError("the stream ended without a goodbye")

    def respond(self) -> link_pb2.Response:
        for frame in self.receive():
            if frame.WhichOneof("kind") == "response":
                return frame.response
        raise AssertionError("the stream ended without a response")

    def __enter__(self) -> RawLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()


def hello_frame(**changes: Any) -> Frame:
    fields = {
        "protocol": 1,
        "peer": random.getrandbits(63) + 1,
        "session": random.getrandbits(63) + 1,
        "name": "hostile",
        "role": link_pb2.Hello.ROLE_CONTROL,
        "attempt": 1,
    }
    return Frame(hello=link_pb2.Hello(**{**fields, **changes}))


def request(
    id: int = 1, body: bytes = b"", method: int = link_pb2.METHOD_FORWARD_WITH_AUTOGRAD, **more: Any
) -> Frame:
    return Frame(request=link_pb2.Request(id=id, method=method, body=body, **more))  # type: ignore[arg-type]


def chunk(transfer: int, offset: int, total: int, data: bytes) -> Frame:
    return Frame(
        transfer_chunk=link_pb2.TransferChunk(transfer=transfer, offset=offset, total=total, data=data)
    )


def call(tensor: tensor_pb2.Tensor | None = None, storage: tensor_pb2.Storage | None = None) -> bytes:
    """A call with one tensor as its argument."""
    message = autograd_pb2.ForwardWithAutogradRequest(function="double")
    message.args.add(tensor=0)
    message.tensors.tensors.append(tensor or tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4]))
    message.tensors.storages.append(storage or tensor_pb2.Storage(size=16, inline=bytes(16)))
    return message.SerializeToString()


def nested(levels: int) -> bytes:
    """A list in a list in a list ..., written by hand: protobuf's own code would refuse to."""

    def field(tag: bytes, content: bytes) -> bytes:
        return tag + frames._varint(len(content)) + content

    value = b"\x18\x02"
    for _ in range(levels):
        value = field(b"\x4a", field(b"\x0a", value))  # Value.list, List.items
    return field(b"\x0a", b"echo") + field(b"\x12", value)


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

# What ends the whole link: (frames after the welcome, part of the farewell).
BREAKS: dict[str, tuple[list[bytes | Frame], str]] = {
    "no protobuf": ([b"\xff\xff\xff"], "no gradwire Envelope"),
    "a cut off envelope": ([frames.envelope(request())[:-1]], "no gradwire Envelope"),
    "deep garbage": ([b"\x0a\x7f" * 10_000], "no gradwire Envelope"),
    "an empty frame": ([Frame()], "unexpected frame"),
    "a second hello": ([hello_frame()], "unexpected frame: hello"),
    "a welcome": ([Frame(welcome=link_pb2.Welcome())], "unexpected frame: welcome"),
    "a chunk beyond its total": ([chunk(1, 0, 4, b"12345")], "bytes 0 to 5 arrived after 0 of 4"),
    "a chunk with a gap": ([chunk(1, 0, 9, b"1"), chunk(1, 5, 9, b"1")], "bytes 5 to 6 arrived after 1 of 9"),
    "a chunk without a beginning": ([chunk(1, 5, 9, b"1")], "lacks its first 5 bytes"),
    "an empty chunk": ([chunk(1, 0, 9, b"")], "bytes 0 to 0 arrived"),
    "an absurd total": ([chunk(1, 0, 1 << 60, b"1")], "exceed the limit"),
    "an offset at the end of numbers": (
        [chunk(1, 0, 9, b"1"), chunk(1, (1 << 64) - 1, 9, b"12")],
        "arrived after",
    ),
    "a transfer named twice": ([request(transfers=[1, 1])], "named as an attachment twice"),
    "a transfer in two requests": ([request(1, transfers=[1]), request(2, transfers=[1])], "twice"),
    "an id that comes twice": ([request(5, b"", 5), request(5, b"", 5)], "request 5 arrived after request 5"),
    "ids that go back": ([request(5, b"", 5), request(4, b"", 5)], "request 4 arrived after request 5"),
    "id 0": ([request(0)], "request 0 arrived after request 0"),
    "too large a frame": ([request(1, bytes(70 << 20))], "exceeds the limit"),
}

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
    "a storage without end": (attachment(1 << 60), [bytes(8)], Code.CODE_MALFORMED),
    "a set of integers of one hash": (set_of_one_hash(60_000), [], Code.CODE_MALFORMED),
    "no function": (b"", [], Code.CODE_UNKNOWN_FUNCTION),
}

HELLOS: dict[str, tuple[bytes, str]] = {
    "no protobuf": (b"\xff\xff", "no gradwire Envelope"),
    "nothing": (b"", "must start with Hello"),
    "a request": (frames.envelope(request()), "must start with Hello"),
    "two frames": (frames.envelope(hello_frame()) * 2, "must start with Hello"),
    "another protocol": (
        frames.envelope(hello_frame(protocol=99)),
        "protocol 99 is not spoken here, only 1 and 2",
    ),
    "no peer": (frames.envelope(hello_frame(peer=0)), "must name a peer"),
    "no session": (frames.envelope(hello_frame(session=0)), "must name a peer"),
    "no role": (frames.envelope(hello_frame(role=0)), "must name a peer"),
    "a role from the future": (frames.envelope(hello_frame(role=9)), "must name a peer"),
    "bulk without control": (
        frames.envelope(hello_frame(role=link_pb2.Hello.ROLE_BULK)),
        "a session that is not open",
    ),
}


def break_link(address: str, name: str) -> None:
    sent, complaint = BREAKS[name]
    with RawLink(address).welcome() as link:
        for data in sent:
            link.send(data)
        assert complaint in link.farewell().message


def fail_request(address: str, name: str) -> None:
    body, attachments, code = FAILS[name]
    with RawLink(address).welcome() as link:
        for id, content in enumerate(attachments, 1):
            link.send(chunk(id, 0, len(content), content))
        link.send(request(1, body, transfers=range(1, len(attachments) + 1)))
        response = link.respond()
        assert response.error.code == code, response
        assert response.error.message
        # The link goes on.
        link.send(request(2, b"", link_pb2.METHOD_PING))
        assert link.respond().id == 2


def refuse_hello(address: str, name: str) -> None:
    hello, complaint = HELLOS[name]
    with RawLink(address, hello) as link:
        error = link.farewell()
        assert complaint in error.message


def fail_unary(address: str, name: str) -> None:
    body = FAILS[name][0]
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(FORWARD)(body, timeout=SECONDS)
    expected = grpc.StatusCode.NOT_FOUND if name == "no function" else grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.code() is expected
    assert caught.value.details()


ATTACKS: list[tuple[Callable[[str, str], None], str]] = [
    *((break_link, name) for name in BREAKS),
    *((fail_request, name) for name in FAILS),
    *((refuse_hello, name) for name in HELLOS),
    *((fail_unary, name) for name in FAILS),
]


@pytest.mark.parametrize(("attack", "name"), ATTACKS, ids=lambda value: getattr(value, "__name__", value))
def test_a_clear_error_and_others_notice_nothing(
    workers: Workers, attack: Callable[[str, str], None], name: str
) -> None:
    with gw.connect(workers.a) as bystander:
        link, process = bystander._link, bystander.process()
        waiting = bystander.call_async("happened", f"{attack.__name__} {name}")
        attack(workers.a, name)
        bystander.signal(f"{attack.__name__} {name}")
        assert waiting.result(SECONDS) is True
        assert bystander._link is link
        assert bystander.process() == process


@pytest.fixture
def worker() -> Iterator[gws.Worker]:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def echo(x: object) -> object:
        return x

    with gws.Worker(double, echo, lease=0.1) as worker:
        yield worker


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def readers() -> int:
    return sum(thread.name.startswith("gradwire-read") for thread in threading.enumerate())


def test_nothing_is_kept_of_hostile_clients(worker: gws.Worker) -> None:
    for attack, name in ATTACKS:
        attack(worker.address, name)
    eventually(lambda: worker._acceptor._accepted == {})
    eventually(lambda: readers() == 0)
    assert worker._scheduler.unfinished == 0
    with gw.connect(worker.address) as handle:
        assert handle.double(21) == 42


def test_a_client_that_vanishes_amid_a_transfer_is_forgotten(worker: gws.Worker) -> None:
    with RawLink(worker.address).welcome() as link:
        link.send(chunk(1, 0, 1 << 30, bytes(1 << 20)))
        link.send(request(1, attachment(1 << 30), transfers=[1, 2]))
        eventually(lambda: held(worker) == 1 << 20)
    eventually(lambda: worker._acceptor._accepted == {})
    eventually(lambda: readers() == 0)


def held(worker: gws.Worker) -> int:
    return sum(accepted.streams.reassembler.held for accepted in worker._acceptor._accepted.values())


def test_thousands_of_early_cancellations_cost_nothing(worker: gws.Worker) -> None:
    with RawLink(worker.address).welcome() as link:
        for id in range(1, 5001):
            link.send(Frame(cancel=link_pb2.Cancel(id=id)))
        for id in range(1, 5001):
            link.send(request(id, attachment(), transfers=[id]))  # never run, and never waited for
        link.send(request(5001, b"", link_pb2.METHOD_PING))
        assert link.respond().id == 5001
        (accepted,) = worker._acceptor._accepted.values()
        reassembler = accepted.streams.reassembler
        assert reassembler.held == 0
        assert reassembler._cancelled == reassembler._unwanted == set()


def test_cancellations_without_end_end_the_link(worker: gws.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.transport.reassembly.Reassembler.MAX_EXPECTED", 100)
    with RawLink(worker.address).welcome() as link:
        for id in range(1, 200):
            link.send(Frame(cancel=link_pb2.Cancel(id=id)))
        assert link.farewell().code == Code.CODE_RESOURCE_EXHAUSTED


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


def test_replies_acknowledgements_and_cancels_out_of_nowhere_are_ignored(worker: gws.Worker) -> None:
    with RawLink(worker.address).welcome() as link:
        link.send(Frame(response=link_pb2.Response(id=77, body=b"for nobody")))
        link.send(Frame(response=link_pb2.Response(id=78, transfers=[1, 2], body=b"for nobody")))
        link.send(Frame(acknowledge=link_pb2.Acknowledge(ids=[1, 2, 1 << 63])))
        link.send(request(1, b"", link_pb2.METHOD_PING))
        assert link.respond().id == 1
        link.send(Frame(cancel=link_pb2.Cancel(id=1)))
        link.send(request(2, b"", 77))
        assert link.respond().error.code == Code.CODE_PROTOCOL


def test_a_name_that_is_no_name_is_made_one(worker: gws.Worker) -> None:
    with RawLink(worker.address, frames.envelope(hello_frame(name="\x1b[31m\n" * 1000))).welcome():
        (session,) = worker._acceptor.sessions
        assert session.peer.name.isprintable()
        assert len(session.peer.name) <= 100


def test_an_attempt_that_was_superseded_is_refused(worker: gws.Worker) -> None:
    ids = {"peer": 5, "session": 6}
    with RawLink(worker.address, frames.envelope(hello_frame(**ids, attempt=2))).welcome():
        with RawLink(worker.address, frames.envelope(hello_frame(**ids, attempt=2))) as again:
            assert "superseded" in again.farewell().message
        with RawLink(worker.address, frames.envelope(hello_frame(**ids, attempt=1))) as older:
            assert "superseded" in older.farewell().message


def test_random_bytes_do_no_harm(worker: gws.Worker) -> None:
    generator = random.Random(0)
    valid = [
        frames.envelope(frame)
        for frame in (
            request(1, call()),
            request(2, attachment(), transfers=[1]),
            chunk(1, 0, 16, bytes(16)),
            Frame(cancel=link_pb2.Cancel(id=2)),
            Frame(acknowledge=link_pb2.Acknowledge(ids=[1])),
        )
    ]
    for _ in range(100):
        with RawLink(worker.address).welcome() as link:
            for data in itertools.islice(itertools.cycle(valid), 5):
                mutated = bytearray(data)
                for _ in range(generator.randrange(3)):
                    mutated[generator.randrange(len(mutated))] = generator.randrange(256)
                link.send(bytes(mutated))
    with gw.connect(worker.address) as handle:
        assert handle.double(21) == 42
    eventually(lambda: worker._acceptor._accepted == {})


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
