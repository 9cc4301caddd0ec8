"""Each limit is kept by the worker itself, per client and for all: against clients that ignore every hint.

Their frames are written by hand. Past a limit they are told RESOURCE_EXHAUSTED and when to come again, and
nothing of what was refused has run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest
import torch
from tests.faults.test_deaths import wait_for
from tests.integration.test_hostile import FORWARD, RawLink, chunk, hello_frame, request

import gradwire as gw
import gradwire_server as gws
from gradwire import wire
from gradwire.proto.v1 import autograd_pb2, link_pb2
from gradwire.transport import frames
from gradwire_server.serving.limits import HoldLimits
from gradwire_server.serving.scheduler import QueueLimits

Code = link_pb2.Error


class Gate:
    """A function that takes until the gate is opened."""

    def __init__(self) -> None:
        self.entered = 0
        self._lock = threading.Lock()
        self._opened = threading.Event()

    def pass_through(self) -> int:
        with self._lock:
            self.entered += 1
        assert self._opened.wait(60)
        return self.entered

    def open(self) -> None:
        self._opened.set()


class Thing(torch.nn.Module):
    """Something to hold."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))


def size_of(x: torch.Tensor) -> int:
    return len(x)


def scaled(size: int) -> torch.Tensor:
    return torch.ones(size, requires_grad=True) * 2


@contextmanager
def serving(gate: Gate, **settings: object) -> Iterator[gws.Worker]:
    def pass_through(x: torch.Tensor | None = None) -> int:
        return gate.pass_through()

    with gws.Worker(pass_through, size_of, scaled, Thing, **settings) as worker:  # type: ignore[arg-type]
        try:
            yield worker
        finally:
            gate.open()


class Ignorant:
    """A client that asks and asks, ignores every hint, and never lets go of anything."""

    def __init__(self, address: str) -> None:
        hello = hello_frame()
        self._node = hello.hello.peer
        self._link = RawLink(address, frames.envelope(hello)).welcome()
        self._asked = 0

    def send_request(self, function: str, *args: object, context: int | None = None) -> int:
        """Calls a function, in one of its contexts if one is given. The number of the request."""
        encoder = wire.Encoder(attach_from=None)
        message = autograd_pb2.ForwardWithAutogradRequest(
            function=function, args=[encoder.value(arg, "argument") for arg in args]
        )
        if context is not None:
            message.autograd.context.peer = self._node
            message.autograd.context.number = context
        self._asked += 1
        self._link.send(request(self._asked, message.SerializeToString()))
        return self._asked

    def ask_large(self, function: str, size: int, *, sent: int | None = None) -> int:
        """Calls a function with a tensor of so many bytes; only the first of them come if `sent` says so."""
        encoder = wire.Encoder()
        message = autograd_pb2.ForwardWithAutogradRequest(
            function=function, args=[encoder.value(torch.zeros(size, dtype=torch.uint8), "argument")]
        )
        table, (attachment,) = encoder.finish()
        message.tensors.CopyFrom(table)
        self._asked += 1
        self._link.send(request(self._asked, message.SerializeToString(), attachments=[size]))
        self._link.send(chunk(self._asked, bytes(attachment.view[:sent])))
        return self._asked

    def cancel(self, asked: int) -> None:
        self._link.send(link_pb2.Frame(cancel=link_pb2.Cancel(id=asked)))

    def answers(self, count: int) -> list[link_pb2.Response]:
        return [self._link.respond() for _ in range(count)]

    def __enter__(self) -> Ignorant:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.__exit__()


def check_refusal(response: link_pb2.Response, says: str) -> None:
    assert response.error.code == Code.CODE_RESOURCE_EXHAUSTED
    assert says in response.error.message
    assert 0 < response.error.retry_after_seconds <= 5


@pytest.mark.parametrize(
    ("settings", "of_one", "of_both"),
    [({"threads": 3}, 3, 3), ({"threads": 5, "threads_per_client": 2}, 2, 4)],
    ids=["all", "client"],
)
def test_concurrent_calls(settings: dict[str, int], of_one: int, of_both: int) -> None:
    gate = Gate()
    with serving(gate, **settings) as worker:
        with Ignorant(worker.address) as first, Ignorant(worker.address) as second:
            for _ in range(10):
                first.send_request("pass_through")
            wait_for(lambda: worker._scheduler.unfinished == 10, "the calls coming in")
            wait_for(lambda: gate.entered == of_one, "as many as may run running")
            for _ in range(10):
                second.send_request("pass_through")
            wait_for(lambda: worker._scheduler.unfinished == 20, "the others' calls coming in")
            wait_for(lambda: gate.entered == of_both, "the others running")
            # All twenty are in, and each that may run was started when it came.
            assert worker._scheduler._running == of_both
            gate.open()
            assert all(response.WhichOneof("outcome") == "body" for response in first.answers(10))
            assert all(response.WhichOneof("outcome") == "body" for response in second.answers(10))


@pytest.mark.parametrize(
    ("settings", "taken"),
    [({"max_queued_calls": 4}, 5), ({"max_queued_calls_per_client": 2}, 3)],
    ids=["all", "client"],
)
def test_queued_calls(settings: dict[str, int], taken: int) -> None:
    gate = Gate()
    with serving(gate, threads=1, **settings) as worker:
        with Ignorant(worker.address) as ignorant:
            for _ in range(20):
                ignorant.send_request("pass_through")
            refused = ignorant.answers(20 - taken)
            for response in refused:
                check_refusal(response, "wait already")
                assert response.error.not_started
            gate.open()
            assert all(response.WhichOneof("outcome") == "body" for response in ignorant.answers(taken))
            assert gate.entered == taken


def test_one_who_was_turned_away_comes_before_one_who_came_later() -> None:
    gate = Gate()
    with serving(gate, threads=1, max_queued_calls=1) as worker, ExitStack() as stack:
        served, early, late = (stack.enter_context(Ignorant(worker.address)) for _ in range(3))
        for _ in range(2):
            served.send_request("pass_through")
        wait_for(lambda: worker._scheduler.unfinished == 2, "the worker being full")
        early.send_request("pass_through")
        check_refusal(early.answers(1)[0], "wait already")
        with worker._scheduler._lock:
            worker._scheduler._limits = QueueLimits(threads=1, queued=2)  # there is room for one now
        late.send_request("pass_through")
        check_refusal(late.answers(1)[0], "wait already")
        early.send_request("pass_through")
        wait_for(lambda: worker._scheduler.unfinished == 3, "its call being taken")


MB = 1_000_000
IN_FLIGHT = [{"max_bytes_in_flight_per_client": 4 * MB}, {"max_bytes_in_flight": 4 * MB}]


@pytest.mark.parametrize("settings", IN_FLIGHT, ids=["client", "all"])
def test_bytes_that_wait(settings: dict[str, int]) -> None:
    gate = Gate()
    with serving(gate, threads=1, **settings) as worker, Ignorant(worker.address) as ignorant:
        # What runs does not count, however large it is; it is the next one that waits.
        ignorant.ask_large("pass_through", 9 * MB)
        wait_for(lambda: gate.entered == 1, "the first running")
        ignorant.ask_large("pass_through", 3 * MB)
        wait_for(lambda: worker._scheduler.unfinished == 2, "the second waiting")
        refused = [ignorant.ask_large("pass_through", 3 * MB) for _ in range(5)]
        for asked, response in zip(refused, ignorant.answers(5), strict=True):
            assert response.id == asked
            check_refusal(response, "bytes of large requests")
            assert response.error.not_started
        gate.open()
        assert all(response.WhichOneof("outcome") == "body" for response in ignorant.answers(2))
        assert gate.entered == 2
        ignorant.ask_large("size_of", 3 * MB)
        assert ignorant.answers(1)[0].WhichOneof("outcome") == "body"


@pytest.mark.parametrize("settings", IN_FLIGHT, ids=["client", "all"])
def test_bytes_that_never_come(settings: dict[str, int]) -> None:
    with serving(Gate(), lease=0.2, **settings) as worker, ExitStack() as stack:
        ignorant = stack.enter_context(Ignorant(worker.address))
        with Ignorant(worker.address) as other:
            stalled = ignorant.ask_large("size_of", 3 * MB, sent=1000)
            is_for_all = "max_bytes_in_flight" in settings
            for client in (ignorant, other) if is_for_all else (ignorant,):
                asked = client.ask_large("size_of", 3 * MB)
                (response,) = client.answers(1)
                assert response.id == asked
                check_refusal(response, "bytes of large requests")
            ignorant.cancel(stalled)
            (response,) = ignorant.answers(1)
            assert (response.id, response.error.code) == (stalled, Code.CODE_CANCELLED)
            other.ask_large("size_of", 3 * MB, sent=1000)
            if not is_for_all:
                # Another's are another's.
                ignorant.ask_large("size_of", 3 * MB)
                assert ignorant.answers(1)[0].WhichOneof("outcome") == "body"

        # The other ended the link without a goodbye.
        def there_is_room() -> bool:
            ignorant.ask_large("size_of", 3 * MB)
            return ignorant.answers(1)[0].WhichOneof("outcome") == "body"

        wait_for(there_is_room, "room")


def test_sizes_that_are_only_said_take_no_memory() -> None:
    declared, count = 2 << 20, 400
    with serving(Gate(), lease=0.2) as worker:
        with gw.connect(worker.address) as handle:
            before = handle.inspect().resident_bytes
            with Ignorant(worker.address) as ignorant:
                for _ in range(count):
                    ignorant.ask_large("size_of", declared, sent=1)
                ignorant.send_request("scaled", 1)
                assert ignorant.answers(1)[0].WhichOneof("outcome") == "body"  # behind the chunks
                assert handle.inspect().resident_bytes - before < declared * count / 5
            wait_for(lambda: len(worker._acceptor._accepted) == 1, "the client being gone")
            assert handle.inspect().resident_bytes - before < declared * count / 5


@pytest.mark.parametrize("settings", IN_FLIGHT, ids=["client", "all"])
def test_a_client_that_keeps_to_its_window_is_never_refused(settings: dict[str, int]) -> None:
    with serving(Gate(), threads=2, **settings) as worker, gw.connect(worker.address) as handle:
        # Some fit in together, one is more than all of it, and some come in several pieces.
        sizes = [3 * MB, 1 * MB, 1 * MB, 9 * MB, 100_000, 2 * MB] * 5
        futures = [handle.call_async("size_of", torch.zeros(size, dtype=torch.uint8)) for size in sizes]
        assert [future.result(60) for future in futures] == sizes
        statistics = handle._link._native.statistics()
        assert statistics["calls"] == statistics["retries"] == 0


def test_what_a_call_waits_for_is_never_kept_back() -> None:
    def bounce(x: torch.Tensor, addresses: list[str], times: int) -> torch.Tensor:
        if not times:
            return x * 2
        return gw.connect(addresses[0]).call("bounce", x, addresses[::-1], times - 1)  # type: ignore[no-any-return]

    # Each of the calls fits into the window, and the next one, which it waits for, does not fit in beside it.
    with (
        gws.Worker(bounce, max_bytes_in_flight=4 * MB) as one,
        gws.Worker(bounce, max_bytes_in_flight=4 * MB) as other,
        gw.connect(one.address) as handle,
    ):
        x = torch.ones(3 * MB // 4, requires_grad=True)
        with gw.timeout(60):
            handle.bounce(x, [other.address, one.address], 5).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2))


def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


def expanded(size: int) -> torch.Tensor:
    return torch.ones(1).expand(size)


def test_what_a_tensor_spans_beyond_its_bytes() -> None:
    with (
        gws.Worker(times, expanded, max_tensor_elements=1000) as worker,
        gw.connect(worker.address, max_tensor_elements=2000) as handle,
    ):
        one = torch.ones(1)
        assert torch.equal(handle.times(one.expand(1000), 2.0), torch.full((1000,), 2.0))
        assert torch.equal(handle.times(torch.ones(5000), 2.0), torch.full((5000,), 2.0))
        for tensor in (one.expand(1001), torch.empty(1001, device="meta"), torch.zeros(1001).to_sparse()):
            with pytest.raises(gw.ResourceExhausted, match="spans 1001 elements"):
                handle.times(tensor, 2.0)
        assert handle.expanded(2000).shape == (2000,)
        with pytest.raises(gw.ResourceExhausted, match="spans 2001 elements"):
            handle.expanded(2001)
        # A gradient is as large as the tensor that it is for, and that of a sum is expanded.
        x, y = torch.ones(5000, requires_grad=True), torch.ones(5000, requires_grad=True)
        handle.times(x, 3.0).sum().backward()
        (y * 3.0).sum().backward()
        assert torch.equal(x.grad, y.grad)
        # What comes back for arguments is expanded, too.
        x.grad = None
        handle.times(x.sum().expand(900), 3.0).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2700.0))


def test_what_a_tensor_of_a_unary_call_spans() -> None:
    with gws.Worker(times, max_tensor_elements=1000) as worker:
        with grpc.insecure_channel(worker.address) as channel:
            encoder = wire.Encoder(attach_from=None)
            message = autograd_pb2.ForwardWithAutogradRequest(function="times")
            message.args.append(encoder.value(torch.ones(1).expand(1001), "x"))
            message.args.append(encoder.value(2.0, "factor"))
            message.tensors.CopyFrom(encoder.finish()[0])
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(FORWARD)(message.SerializeToString(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_few_bytes_do_not_become_gigabytes_by_default() -> None:
    with gws.Worker(times) as worker, gw.connect(worker.address) as handle:
        with pytest.raises(gw.ResourceExhausted, match="spans 1000000000 elements"):
            handle.times(torch.ones(1).expand(10**9), 2.0)


HELD = {
    "contexts": (HoldLimits(contexts_per_client=4), HoldLimits(contexts=4)),
    "objects": (HoldLimits(objects_per_client=4), HoldLimits(objects=4)),
    "bytes of results": (HoldLimits(bytes_per_client=40_000), HoldLimits(bytes=40_000)),
    "bytes of objects": (HoldLimits(bytes_per_client=40_000), HoldLimits(bytes=40_000)),
}


def hold_one(client: Ignorant, what: str, number: int) -> None:
    """Makes the worker hold one more thing, of some ten thousand bytes if bytes are what matters."""
    if what == "contexts":
        client.send_request("scaled", 1, context=number)
    elif what == "bytes of results":
        client.send_request("scaled", 2500, context=1)
    else:
        client.send_request("Thing", 2500 if what == "bytes of objects" else 1)


@pytest.mark.parametrize("what", HELD)
def test_what_is_held_for_one_client(what: str) -> None:
    with serving(Gate(), hold_limits=HELD[what][0]) as worker:
        with Ignorant(worker.address) as ignorant, Ignorant(worker.address) as other:
            for number in range(1, 10):
                hold_one(ignorant, what, number)
                (response,) = ignorant.answers(1)
                if number <= 5:
                    assert response.WhichOneof("outcome") == "body", response
                else:
                    check_refusal(response, what.split()[0])
                    # Nothing that others do makes room for it, so a client must not wait by itself.
                    assert not response.error.not_started
            hold_one(other, what, 1)
            assert other.answers(1)[0].WhichOneof("outcome") == "body"


@pytest.mark.parametrize("what", HELD)
def test_what_is_held_for_all(what: str) -> None:
    with serving(Gate(), hold_limits=HELD[what][1], lease=0.2) as worker:
        with Ignorant(worker.address) as ignorant:
            with Ignorant(worker.address) as other:
                for number in range(1, 6):
                    hold_one(ignorant if number % 2 else other, what, number)
                    assert (ignorant if number % 2 else other).answers(1)[0].WhichOneof("outcome") == "body"
                for client in (ignorant, other):
                    hold_one(client, what, 9)
                    (response,) = client.answers(1)
                    check_refusal(response, what.split()[0])
                    assert response.error.not_started
            # One goes, and with its lease what was held for it: there is room again.

            def there_is_room() -> bool:
                hold_one(ignorant, what, 1)
                return ignorant.answers(1)[0].WhichOneof("outcome") == "body"

            wait_for(there_is_room, "room")


def test_unary_calls_are_told_when_to_come_again() -> None:
    gate = Gate()
    with serving(gate, threads=1, max_queued_calls=1) as worker, Ignorant(worker.address) as ignorant:
        for _ in range(2):
            ignorant.send_request("pass_through")
        wait_for(lambda: worker._scheduler.unfinished == 2, "the worker being full")
        with grpc.insecure_channel(worker.address) as channel:
            body = autograd_pb2.ForwardWithAutogradRequest(function="pass_through").SerializeToString()
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(FORWARD)(body, timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hints = dict(caught.value.trailing_metadata())
        assert int(hints["grpc-retry-pushback-ms"]) > 0
        assert gate.entered == 1


def test_a_user_sees_the_hint() -> None:
    with serving(Gate(), hold_limits=HoldLimits(objects_per_client=1)) as worker:
        with gw.connect(worker.address) as handle:
            kept = [handle.create("Thing", 1) for _ in range(2)]
            with pytest.raises(gw.ResourceExhausted, match="delete some") as caught:
                handle.create("Thing", 1)
            assert caught.value.retry_after > 0
            kept[0].delete()
            handle.create("Thing", 1)
