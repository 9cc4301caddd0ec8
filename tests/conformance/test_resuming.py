"""A gRPC link whose streams are cut resumes: nothing is lost, and nothing runs twice."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from tests.conformance.ends import CARRIED, SECONDS, SWITCHED, Ends, Memory, Peer, echo, opened, serving
from tests.conformance.proxy import Proxy
from tests.conformance.test_links import PING, Held, arrived_bytes, attachments_of, body_of
from tests.faults import carriers

from gradwire import errors
from gradwire.transport import (
    GrpcLink,
    GrpcStream,
    LinkSettings,
    ServerCall,
    SocketCarrier,
)

SOCKETS = ("unix", "tcp")


@pytest.fixture(params=CARRIED)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with opened(request.param) as ends:
        yield ends
        assert not ends.switch or ends.switch.cuts


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def cut(ends: Ends) -> None:
    """Cuts the streams, once there are some, and returns when the right end has noticed."""
    assert isinstance(ends.left, GrpcLink)
    eventually(lambda: ends.right.connected)
    before = ends.right._carrier  # type: ignore[attr-defined]
    give_up_at = time.monotonic() + SECONDS
    while ends.right._carrier is before:  # type: ignore[attr-defined]
        ends.left._cut()  # repeated, since new streams may just be opening
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def test_requests_after_a_cut_get_responses(ends: Ends) -> None:
    for number in range(5):
        cut(ends)
        assert body_of(ends.left.send_request(PING, str(number).encode())) == str(number).encode()
        assert body_of(ends.right.send_request(PING, b"back")) == b"back"
    assert ends.acceptor is not None
    assert ends.acceptor.sessions == [ends.right]


def test_a_request_that_runs_during_a_cut_runs_once(ends: Ends) -> None:
    held = ends.there.respond = Held()
    future = ends.left.send_request(PING, b"once")
    (server_call,) = held.wait()
    cut(ends)
    # Sent later on the same stream, so the first request has arrived again by now.
    ends.there.respond = lambda server_call: server_call.respond(b"")
    ends.left.send_request(PING, b"later").result(SECONDS)
    server_call.respond(b"the response")
    assert body_of(future) == b"the response"
    assert ends.there.received == [b"once", b"later"]


def test_a_request_of_the_other_peer_that_runs_during_a_cut_runs_once(ends: Ends) -> None:
    held = ends.here.respond = Held()
    future = ends.right.send_request(PING, b"once")
    (server_call,) = held.wait()
    cut(ends)
    server_call.respond(b"the response")
    assert body_of(future) == b"the response"
    assert ends.here.received == [b"once"]


def test_a_server_call_may_wait_for_the_same_link_during_a_cut(ends: Ends) -> None:
    held = ends.there.respond = Held()

    def respond(server_call: ServerCall) -> None:
        def call_back() -> None:
            server_call.respond(body_of(ends.left.send_request(PING, b"back")))

        if server_call.may_run_inline():
            call_back()
        else:
            threading.Thread(target=call_back).start()

    ends.here.respond = respond
    future = ends.right.send_request(PING, b"")
    (nested_call,) = held.wait()
    cut(ends)
    nested_call.respond(b"the response")
    assert body_of(future) == b"the response"


def test_a_response_during_a_cut_arrives(ends: Ends) -> None:
    held = ends.there.respond = Held()
    future = ends.left.send_request(PING, b"", [Memory(bytes(100))])
    (server_call,) = held.wait()
    cut(ends)
    server_call.respond(b"late", [Memory(b"x" * 300_000)])
    assert attachments_of(future) == [b"x" * 300_000]
    assert len(ends.there.received) == 1


def test_a_cut_during_a_large_transfer_costs_only_time(ends: Ends) -> None:
    content = bytes(range(256)) * (64 << 12)
    future = ends.left.send_request(PING, b"large", [Memory(content)])
    cut(ends)
    assert attachments_of(future) == [content]
    assert ends.there.received == [b"large"]
    assert arrived_bytes(ends.left) == 0


def test_many_cuts_during_many_requests_lose_and_repeat_nothing(ends: Ends) -> None:
    bodies = [str(number).encode() for number in range(300)]
    futures = []
    for number, body in enumerate(bodies):
        attachments = [Memory(body * 50_000)] if number % 10 == 0 else []
        futures.append(ends.left.send_request(PING, body, attachments))
        if number % 60 == 30:
            cut(ends)
    assert [body_of(future) for future in futures] == bodies
    assert sorted(ends.there.received) == sorted(bodies)


@pytest.mark.parametrize("requester", ["left", "right"])
def test_attachments_sent_again_after_a_cut_are_freed_when_they_have_arrived(
    ends: Ends, requester: str
) -> None:
    requester_link, server, held = ends.left, ends.there, Held()
    if requester == "right":
        requester_link, server = ends.right, ends.here
    server.respond = held
    request, response = Memory(bytes(300_000)), Memory(bytes(300_000))
    future = requester_link.send_request(PING, b"", [request])
    (server_call,) = held.wait()
    cut(ends)
    server_call.respond(b"", [response])
    assert attachments_of(future) == [bytes(300_000)]
    left = [weakref.ref(request), weakref.ref(response)]
    server.respond = lambda server_call: server_call.respond(b"")
    del request, response, future, server_call, held
    requester_link.send_request(PING, b"").result(SECONDS)  # acknowledges the response before it
    eventually(lambda: [memory() for memory in left] == [None, None])


@pytest.mark.parametrize("requester", ["left", "right"])
def test_a_request_cancelled_during_a_cut_is_cancelled_at_the_other_peer(ends: Ends, requester: str) -> None:
    requester_link, server, held = ends.left, ends.there, Held()
    if requester == "right":
        requester_link, server = ends.right, ends.here
    server.respond = held
    for _ in range(10):  # so that some cancellations come before the new streams
        future = requester_link.send_request(PING, b"")
        server_call = held.wait()[-1]
        cut(ends)
        assert future.cancel()
        eventually(lambda server_call=server_call: server_call.cancelled)  # type: ignore[misc]
        server_call.respond(b"")


@pytest.mark.parametrize("kind", SOCKETS)
def test_a_socket_that_dies_alone_costs_only_time(kind: str) -> None:
    with opened(kind) as ends:
        assert isinstance(ends.left, GrpcLink)
        ends.left._avoid_direct = lambda: None  # type: ignore[method-assign] # it goes back to the socket
        content = bytes(range(256)) * (64 << 12)
        for number in range(5):
            assert carriers.carrier_of(ends.left) == kind
            future = ends.left.send_request(PING, str(number).encode(), [Memory(content)])
            assert carriers.cut(SOCKETS)
            assert attachments_of(future) == [content]
        assert ends.there.received == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("kind", SWITCHED)
def test_carriers_that_die_by_turns_lose_and_repeat_nothing(kind: str) -> None:
    """The first of two goes on with the second, and that with the first, with requests of both ends and
    their attachments under way."""
    with opened(kind) as ends:
        assert ends.switch is not None
        bodies = [str(number).encode() for number in range(64)]
        contents = [body * (200_000 if number % 8 == 0 else 20) for number, body in enumerate(bodies)]
        futures = [
            end.send_request(PING, body, [Memory(content)])
            for body, content in zip(bodies, contents, strict=True)
            for end in (ends.left, ends.right)
        ]
        assert [attachments_of(future) for future in futures[::2]] == [[content] for content in contents]
        assert [attachments_of(future) for future in futures[1::2]] == [[content] for content in contents]
        for peer in (ends.here, ends.there):
            assert sorted(peer.received) == sorted(bodies)
        first, second = kind.split(" and ")
        # The number is known for moments that find the link connected, which the first one does.
        assert ends.switch.cuts[first] >= 1
        while not ends.switch.cuts[second]:
            assert body_of(ends.left.send_request(PING, b"more")) == b"more"


def test_requests_that_were_read_from_a_dead_socket_and_not_served_yet_are_served() -> None:
    with opened("tcp") as ends:
        bodies = [str(number).encode() for number in range(300)]

        def respond(server_call: ServerCall) -> None:
            if server_call.request.body == bodies[0]:
                # All have been read by now, or will be: they came in one write.
                assert carriers.cut(SOCKETS)
            # Until then, threads of the event loop are busy, and requests that were read wait for one.
            eventually(lambda: isinstance(ends.right._carrier, GrpcStream))  # type: ignore[attr-defined]
            echo(server_call)

        ends.there.respond = respond
        futures = [ends.left.send_request(PING, body) for body in bodies]
        assert [body_of(future) for future in futures] == bodies
        assert sorted(ends.there.received) == sorted(bodies)


def test_a_link_that_is_closed_as_soon_as_it_is_connected_again_says_goodbye(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened("grpc") as ends:
        left = ends.left
        assert isinstance(left, GrpcLink)
        ended, closed = threading.Event(), threading.Event()
        ends.right.when_ended(lambda _: ended.set())
        handle, take_output = left.handle_events, left.take_output

        def close_then_handle(*args: int, **options: int) -> None:
            if threading.current_thread() is left._supervisor:
                left.close()
                closed.set()
            handle(*args, **options)

        def take_late(stream: GrpcStream) -> bytes | None:
            assert closed.wait(SECONDS)
            return take_output(stream)

        monkeypatch.setattr(left, "handle_events", close_then_handle)
        monkeypatch.setattr(left, "take_output", take_late)
        left._cut()
        assert ended.wait(SECONDS)
        assert isinstance(ends.right.ended, errors.LinkClosed)


def test_a_direct_socket_that_is_blocked_is_left_for_grpc() -> None:
    with opened("tcp") as ends:
        assert body_of(ends.left.send_request(PING, b"direct")) == b"direct"
        assert isinstance(ends.left._carrier, SocketCarrier)  # type: ignore[attr-defined]
        assert ends.acceptor is not None
        ends.acceptor._listeners["direct"].close()  # type: ignore[union-attr]
        ends.left._avoids_direct_until = 1e300  # type: ignore[attr-defined]
        cut(ends)
        assert body_of(ends.left.send_request(PING, b"over gRPC")) == b"over gRPC"
        ends.left._avoids_direct_until = 0.0  # type: ignore[attr-defined]
        cut(ends)
        assert body_of(ends.left.send_request(PING, b"still")) == b"still"
        assert isinstance(ends.left._carrier, GrpcStream)  # type: ignore[attr-defined]
        assert ends.left._avoids_direct_until > 0  # type: ignore[attr-defined]


def test_a_deadline_runs_on_during_a_cut() -> None:
    settings = LinkSettings(connect_timeout=SECONDS, lost_after=SECONDS)
    peer = Peer("there")
    with serving(peer, settings) as (_, address), Proxy(address) as proxy:
        link = GrpcLink(proxy.address, Peer("here").identity, peer.handle, settings)
        link.connect()
        proxy.open = False
        proxy.cut()
        with pytest.raises(errors.DeadlineExceeded):
            link.send_request(PING, b"", timeout=0.2).result(SECONDS)
        link.close()


def test_the_network_comes_back() -> None:
    settings = LinkSettings(connect_timeout=SECONDS, lost_after=SECONDS)
    here, there = Peer("here"), Peer("there")
    with serving(there, settings) as (_, address), Proxy(address) as proxy:
        link = GrpcLink(proxy.address, here.identity, here.handle, settings)
        link.connect()
        proxy.open = False
        proxy.cut()
        future = link.send_request(PING, b"patience", [Memory(bytes(200_000))])
        proxy.open = True
        assert attachments_of(future) == [bytes(200_000)]
        assert proxy.connections >= 2
        link.close()


def test_requests_held_back_by_the_window_that_fail_free_their_share() -> None:
    settings = LinkSettings(
        connect_timeout=SECONDS,
        lost_after=SECONDS,
        wait_for_ready=False,
        max_bytes_in_flight=300_000,
    )
    here, there = Peer("here"), Peer("there", Held())
    with serving(there, settings) as (_, address), Proxy(address) as proxy:
        link = GrpcLink(proxy.address, here.identity, here.handle, settings)
        link.connect()
        first = link.send_request(PING, b"first", [Memory(bytes(200_000))])
        there.wait_for_requests()
        kept_back = [link.send_request(PING, b"kept back", [Memory(bytes(200_000))]) for _ in range(3)]
        proxy.open = False
        proxy.cut()
        eventually(lambda: not link.connected)
        assert first.cancel()
        for future in kept_back:
            with pytest.raises(errors.ConnectFailed):
                future.result(SECONDS)
        proxy.open = True
        eventually(lambda: link.connected)
        (server_call,) = there.respond.server_calls  # type: ignore[attr-defined]
        server_call.respond(b"")
        there.respond = echo
        assert body_of(link.send_request(PING, b"next", [Memory(bytes(200_000))])) == b"next"
        assert there.received == [b"first", b"next"]
        link.close()


def test_an_unreachable_peer_is_lost_at_both_ends() -> None:
    settings = LinkSettings(connect_timeout=SECONDS, lost_after=0.4, lease=0.4)
    here, there = Peer("here"), Peer("there", Held())
    here.respond = Held()
    with serving(there, settings) as (acceptor, address), Proxy(address) as proxy:
        link = GrpcLink(proxy.address, here.identity, here.handle, settings)
        link.connect()
        (other,) = acceptor.sessions
        mine, theirs = link.send_request(PING, b""), other.send_request(PING, b"")
        here.wait_for_requests()
        there.wait_for_requests()
        proxy.open = False
        proxy.cut()
        with pytest.raises(errors.WorkerLost, match=r"there .* has been out of reach for 0.4 s"):
            mine.result(SECONDS)
        with pytest.raises(errors.WorkerLost, match=r"here was out of reach for 0.4 s"):
            theirs.result(SECONDS)
        assert acceptor.sessions == []
        assert there.respond.server_calls[0].cancelled  # type: ignore[attr-defined]
        link.close()


def test_a_client_that_returns_after_its_lease_is_told_so() -> None:
    settings = LinkSettings(connect_timeout=SECONDS, lost_after=SECONDS, lease=0.05)
    here, there = Peer("here"), Peer("there")
    with serving(there, settings) as (acceptor, address), Proxy(address) as proxy:
        link = GrpcLink(proxy.address, here.identity, here.handle, settings)
        link.connect()
        (other,) = acceptor.sessions
        forgotten = threading.Event()
        other.when_ended(lambda _: forgotten.set())
        proxy.open = False
        proxy.cut()
        assert forgotten.wait(SECONDS)
        future = link.send_request(PING, b"must not run")
        proxy.open = True
        with pytest.raises(errors.WorkerLost, match="has dropped this client's lease"):
            future.result(SECONDS)
        assert there.received == []
        assert acceptor.sessions == []
        link.close()


def test_a_restarted_worker_is_another_peer() -> None:
    settings = LinkSettings(connect_timeout=SECONDS, lost_after=SECONDS)
    here, first, second = Peer("here"), Peer("there"), Peer("there")
    with serving(first, settings) as (_, address), serving(second, settings) as (acceptor, other_address):
        with Proxy(address) as proxy:
            link = GrpcLink(proxy.address, here.identity, here.handle, settings)
            link.connect()
            host, _, port = other_address.rpartition(":")
            proxy._target = (host, int(port))
            proxy.cut()
            future = link.send_request(PING, b"must not run")
            with pytest.raises(errors.WorkerLost, match="was restarted"):
                future.result(SECONDS)
            assert first.received == second.received == []
            assert acceptor.sessions == []
            link.close()
