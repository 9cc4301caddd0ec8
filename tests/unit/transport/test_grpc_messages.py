"""The private names of grpcio that links rely on, and links without them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import torch
from tests.unit.system.support import SECONDS, eventually

import gradwire as gw
import gradwire_server as gws
from gradwire.transport import grpc_messages

SIZES = [0, 1, 1000, 1 << 20]


@pytest.fixture
def address() -> Iterator[str]:
    """Of a server that echoes what it reads, a message at a time."""

    def serve(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        messages = grpc_messages.of_server(context)
        assert messages is not None
        read: SimpleQueue[bytes | None] = SimpleQueue()
        yield b"welcome"
        messages.read(read.put)
        while (data := read.get(timeout=SECONDS)) is not None:
            written = threading.Event()
            assert messages.write(data, written.set)
            assert written.wait(SECONDS)

    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(SECONDS)


def test_messages_arrive_in_order_at_both_ends_and_then_the_end(address: str) -> None:
    to_write: SimpleQueue[bytes | None] = SimpleQueue()
    to_write.put(b"hello")
    read: SimpleQueue[bytes | None] = SimpleQueue()
    over = threading.Event()
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.stream_stream("/test/Echo")(iter(to_write.get, None))
        assert next(call) == b"welcome"
        messages = grpc_messages.of_client(call)
        assert messages is not None
        call.add_callback(over.set)
        messages.read(read.put)
        assert read.get(timeout=SECONDS) == b"hello"  # the iterator has written it
        for size in SIZES:
            written = threading.Event()
            assert messages.write(bytes(size), written.set)
            assert written.wait(SECONDS)
        assert [len(read.get(timeout=SECONDS) or b"") for _ in SIZES] == SIZES
        to_write.put(None)
        assert read.get(timeout=SECONDS) is None
        assert over.wait(SECONDS)
        assert not messages.write(b"late", over.set)


@pytest.mark.parametrize("is_available", [True, False], ids=["messages", "iterators"])
def test_a_link_needs_none_of_the_private_names(is_available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert grpc_messages.AVAILABLE, "try it with this version of grpcio, and note that in `_TRIED`"
    monkeypatch.setattr(grpc_messages, "AVAILABLE", is_available)
    with gws.Worker(torch.neg) as worker:
        with gw.connect(worker.address, same_host=False, direct=False) as handle:
            for size in (1, 1 << 16, 1 << 22):
                x = torch.ones(size, requires_grad=True)
                y = handle.neg(x)
                assert torch.equal(y, -x)
                y.sum().backward()
                assert torch.equal(x.grad, -torch.ones(size))  # type: ignore[arg-type]
            futures = [handle.call_async("neg", torch.tensor(number)) for number in range(100)]
            assert [int(future.result()) for future in futures] == [-number for number in range(100)]
            readers = [t for t in threading.enumerate() if t.name.startswith("gradwire-read")]
            assert len(readers) == (0 if is_available else 2)
        eventually(lambda: worker._acceptor.sessions == [])
