"""What a session promises, one promise a test. `test_random_sessions` looks for what nobody thought of."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from gradwire.proto.v1 import link_pb2
from gradwire.transport import native

from .wiring import (
    CANCELLED,
    FAILED,
    METHOD,
    NO_MEMORY,
    REFUSAL,
    Ends,
    frames_in,
    kinds_in,
    new_session,
    of_kind,
    only,
)

BIG = 300 * 1024
"""More than one chunk."""


def pattern(size: int, start: int = 0) -> bytes:
    return bytes((start + i) % 251 for i in range(size))


class TestCalls:
    def test_a_request_and_its_response_cross(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"question", [b"one", b"", pattern(BIG)], 5.0)
        (request,) = ends.requests()
        assert (request.method, request.body, request.deadline) == (METHOD, b"question", 5.0)
        assert [bytes(part) for part in request.attachments] == [b"one", b"", pattern(BIG)]
        assert ends.b.respond(request.id, b"answer", [pattern(BIG, 7), b""])
        ends.exchange()
        response = only(ends.a, native.RESPONSE)
        assert (response.id, response.body) == (handle, b"answer")
        assert [bytes(part) for part in response.attachments] == [pattern(BIG, 7), b""]

    def test_an_error_arrives_as_it_was_sent(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        assert ends.b.fail(request.id, FAILED)
        ends.exchange()
        error = only(ends.a, native.ERROR)
        assert (error.id, error.body) == (handle, FAILED)

    def test_a_request_has_one_response(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        assert ends.b.respond(request.id, b"first")
        assert not ends.b.respond(request.id, b"second")
        assert not ends.b.fail(request.id, FAILED)
        assert not ends.b.respond(request.id + 1, b"to nothing")
        ends.exchange()
        assert only(ends.a, native.RESPONSE).body == b"first"

    def test_both_peers_may_send_requests(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"from a")
        ends.b.call(0.0, METHOD, b"from b")
        ends.exchange()
        assert only(ends.b, native.REQUEST).body == b"from a"
        assert only(ends.a, native.REQUEST).body == b"from b"

    def test_small_attachments_are_copied_when_the_call_is_made(self) -> None:
        ends = Ends()
        memory = bytearray(b"before")
        ends.a.call(0.0, METHOD, b"", [memory])
        memory[:] = b"after!"
        (request,) = ends.requests()
        assert bytes(request.attachments[0]) == b"before"

    def test_memory_of_large_attachments_is_held_until_the_response_is_there(self) -> None:
        class Memory(bytearray):
            pass

        ends = Ends()
        memory = Memory(BIG)
        alive = weakref.ref(memory)
        ends.a.call(0.0, METHOD, b"", [memory])
        del memory
        (request,) = ends.requests()
        gc.collect()
        assert alive() is not None
        ends.b.respond(request.id, b"")
        ends.exchange()
        of_kind(ends.a, native.RESPONSE)
        gc.collect()
        assert alive() is None

    def test_what_arrived_can_be_written_to(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [pattern(BIG)])
        (request,) = ends.requests()
        memoryview(request.attachments[0])[:3] = b"abc"
        assert bytes(request.attachments[0])[:4] == b"abc" + pattern(4)[3:]


class TestDeadlines:
    def test_a_call_expires_at_its_deadline_and_not_before(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"", [], 2.0)
        (request,) = ends.requests()
        assert ends.a.next_tick == 2.0
        ends.wait(1.999)
        assert not ends.a.take_events()
        ends.wait(0.001)
        assert only(ends.a, native.EXPIRED).id == handle
        ends.exchange()
        assert only(ends.b, native.CANCELLED).id == request.id

    def test_a_response_that_comes_too_late_is_not_one(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"", [], 2.0)
        (request,) = ends.requests()
        ends.b.respond(request.id, b"late")
        ends.now = 2.0  # nobody has called tick
        ends.exchange()
        expired, discarded = ends.a.take_events()
        assert (expired.kind, expired.id) == (native.EXPIRED, handle)
        assert (discarded.kind, discarded.id, discarded.body) == (native.DISCARDED, handle, b"late")

    def test_the_other_peer_is_told_the_time_that_is_left(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [], 10.0)
        ends.now = 4.0
        ends.reconnect()
        (request,) = ends.requests()
        assert request.deadline == 10.0

    def test_a_large_response_that_comes_too_late_is_not_one_either(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [], 2.0)
        (request,) = ends.requests()
        ends.b.respond(request.id, b"late", [pattern(3 * BIG)])
        ends.deliver(ends.b, 1)
        ends.now = 2.0
        ends.exchange()
        assert [event.kind for event in ends.a.take_events()] == [native.EXPIRED, native.DISCARDED]

    def test_calls_that_are_over_leave_no_timers(self) -> None:
        ends = Ends()
        for _ in range(5000):
            ends.a.call(0.0, METHOD, b"", [], 60.0)
            ends.serve(lambda request: [b""])
        assert ends.a.statistics()["calls"] == 0
        ends.wait(60.0)
        assert ends.a.next_tick is None


class TestCancelling:
    def test_the_other_peer_is_told_and_responds_all_the_same(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        assert ends.a.withdraw(0.0, handle)
        assert not ends.a.withdraw(0.0, handle)
        ends.exchange()
        assert only(ends.b, native.CANCELLED).id == request.id
        assert ends.a.statistics()["calls"] == 1
        assert not ends.b.respond(request.id, b"nobody wants it")
        ends.exchange()
        assert not ends.a.take_events()
        assert ends.a.statistics()["calls"] == 0

    def test_a_response_that_crosses_with_the_cancellation_is_shown_as_discarded(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        assert ends.b.respond(request.id, b"crossing", [pattern(BIG)])
        ends.a.withdraw(0.0, handle)
        ends.exchange()
        discarded = only(ends.a, native.DISCARDED)
        assert (discarded.id, discarded.body, discarded.attachments) == (handle, b"crossing", ())
        assert only_acknowledged(ends.b) == [request.id]

    def test_a_request_that_was_not_written_yet_is_not_sent(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"", [pattern(BIG)])
        assert ends.a.withdraw(0.0, handle)
        assert ends.a.statistics()["calls"] == 0
        assert ends.a.take_output() == b""
        ends.a.call(0.0, METHOD, b"next")
        (request,) = ends.requests()
        assert request.body == b"next"

    def test_a_request_that_was_not_written_yet_keeps_no_memory(self) -> None:
        class Memory(bytearray):
            pass

        ends = Ends()
        ends.a.call(0.0, METHOD, b"before it")
        memory = Memory(BIG)
        alive = weakref.ref(memory)
        handle = ends.a.call(0.0, METHOD, b"", [memory])
        del memory
        ends.a.withdraw(0.0, handle)
        gc.collect()
        assert alive() is None

    def test_a_request_that_has_partly_arrived_is_dropped(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"", [pattern(3 * BIG)])
        ends.deliver(ends.a, 2)
        assert ends.b.statistics()["quota_bytes"] == 3 * BIG
        ends.a.withdraw(0.0, handle)
        ends.exchange()
        assert not ends.b.take_events()
        assert not ends.a.take_events()
        assert ends.b.statistics()["quota_bytes"] == 0
        assert ends.a.statistics()["calls"] == 0

    def test_a_response_that_has_partly_arrived_is_dropped(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        ends.b.respond(request.id, b"body", [pattern(5 * BIG)])
        ends.deliver(ends.b, 1)
        ends.a.withdraw(0.0, handle)
        assert only(ends.a, native.DISCARDED).body == b"body"
        ends.deliver(ends.a)
        assert not ends.b.has_output
        assert ends.a.statistics()["calls"] == ends.b.statistics()["inbound_calls"] == 0

    def test_a_cancellation_survives_a_cut(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        ends.a.withdraw(0.0, handle)
        ends.reconnect()
        ends.exchange()
        assert only(ends.b, native.CANCELLED).id == request.id

    def test_a_request_says_that_its_cancellation_is_behind_it(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"cancelled")
        ends.a.call(0.0, METHOD, b"wanted")
        ends.deliver(ends.a)
        ends.a.withdraw(0.0, handle)
        ends.deliver(ends.a)
        assert [event.flag for event in ends.b.take_events(0, 1)] == [True]
        request, cancelled = ends.b.take_events()
        assert (request.body, request.flag) == (b"wanted", False)
        assert cancelled.kind == native.CANCELLED

    def test_a_request_that_is_cancelled_while_it_waits_to_be_sent_again(self) -> None:
        ends = Ends()
        first = ends.a.call(0.0, METHOD, b"first")
        ends.a.call(0.0, METHOD, b"second")
        ends.a.take_output()  # both are lost
        ends.reconnect()
        ends.a.withdraw(0.0, first)
        (event,) = ends.serve(lambda request: [request.body])
        assert event.body == b"second"
        assert ends.a.statistics()["calls"] == 0

    def test_a_request_that_never_arrived_is_not_waited_for(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"lost")
        ends.a.take_output()
        ends.a.withdraw(0.0, handle)
        later = ends.a.call(0.0, METHOD, b"later")
        ends.reconnect()
        (event,) = ends.serve(lambda request: [request.body])
        assert (event.id, event.body) == (later, b"later")
        assert ends.a.statistics()["calls"] == 0


class TestCuts:
    def test_a_request_that_arrived_is_served_once(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [pattern(BIG)])
        (request,) = ends.requests()
        ends.reconnect()
        ends.exchange()
        assert not ends.b.take_events()
        assert ends.b.statistics()["repeated_requests"] == 1
        ends.b.respond(request.id, b"answer")
        ends.exchange()
        assert only(ends.a, native.RESPONSE).body == b"answer"

    def test_a_response_that_was_lost_comes_again(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        ends.b.respond(request.id, b"answer", [pattern(BIG)])
        ends.b.take_output()
        ends.reconnect()
        ends.exchange()
        response = only(ends.a, native.RESPONSE)
        assert (response.body, bytes(response.attachments[0])) == (b"answer", pattern(BIG))

    def test_a_response_whose_acknowledgement_was_lost_is_not_seen_twice(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        ends.b.respond(request.id, b"answer")
        ends.exchange()
        assert only(ends.a, native.RESPONSE).body == b"answer"
        ends.reconnect()
        ends.exchange()
        assert not ends.a.take_events()
        assert ends.a.statistics()["repeated_responses"] == 1

    def test_a_request_that_had_partly_arrived_starts_anew(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [pattern(3 * BIG)])
        ends.a.call(0.0, METHOD, b"small")
        ends.deliver(ends.a, 2)
        assert only(ends.b, native.REQUEST).body == b"small"
        ends.reconnect()
        (large,) = ends.requests()
        assert bytes(large.attachments[0]) == pattern(3 * BIG)

    def test_a_response_that_had_partly_arrived_starts_anew(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        ends.b.respond(request.id, b"", [pattern(3 * BIG)])
        ends.deliver(ends.b, 2)
        ends.reconnect()
        ends.exchange()
        assert bytes(only(ends.a, native.RESPONSE).attachments[0]) == pattern(3 * BIG)

    def test_calls_that_are_made_meanwhile_go_out_afterwards(self) -> None:
        ends = Ends()
        ends.a.detach()
        ends.b.detach()
        ends.a.call(0.0, METHOD, b"meanwhile")
        assert not ends.a.attached
        assert ends.a.take_output() == b""
        ends.reconnect()
        assert [request.body for request in ends.requests()] == [b"meanwhile"]

    def test_what_comes_without_a_connection_is_ignored(self) -> None:
        """A thread may still hold what it has read from the connection before."""
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [pattern(BIG)])
        written = ends.a.take_output()
        ends.b.detach()
        ends.b.receive(0.0, written)
        ends.reconnect()
        assert len(ends.requests()) == 1

    def test_a_replayed_request_is_not_served_again(self) -> None:
        """As an attacker would, or a proxy that repeats what it has seen."""
        ends = Ends()
        ends.a.call(0.0, METHOD, b"once")
        written = ends.a.take_output()
        ends.b.receive(0.0, written)
        ends.b.respond(only(ends.b, native.REQUEST).id, b"answer")
        ends.a.call(0.0, METHOD, b"another")  # brings the acknowledgement
        ends.exchange()
        assert only(ends.b, native.REQUEST).body == b"another"
        ends.b.receive(0.0, written)
        assert not ends.b.take_events()


class TestLargeMessages:
    def test_small_messages_go_between_the_chunks_of_large_ones(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"large", [pattern(5 * BIG)])
        ends.deliver(ends.a, 1)
        ends.a.call(0.0, METHOD, b"small")
        written = ends.a.take_output()
        assert kinds_in(written) == ["request", "chunk"]
        ends.b.receive(0.0, written)
        assert only(ends.b, native.REQUEST).body == b"small"

    def test_large_messages_take_turns(self) -> None:
        ends = Ends()
        for body in (b"first", b"second"):
            ends.a.call(0.0, METHOD, body, [pattern(5 * BIG)])
        chunks = [
            frame.chunk.message
            for _ in range(6)
            for frame in frames_in(ends.a.take_output())
            if frame.HasField("chunk")
        ]
        assert chunks == [1, 2, 1, 2, 1, 2]

    def test_a_chunk_follows_its_message_however_much_waits(self) -> None:
        ends = Ends()
        bodies = [bytes([i]) * 40_000 for i in range(20)]
        for body in bodies:
            ends.a.call(0.0, METHOD, body, [body * 2])
        assert [request.body for request in ends.requests()] == bodies

    def test_many_attachments_share_chunks(self) -> None:
        ends = Ends()
        parts = [pattern(1000, i) for i in range(200)]
        ends.a.call(0.0, METHOD, b"", parts)
        assert kinds_in(ends.a.take_output()) == ["request", "chunk"]
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", parts)
        (request,) = ends.requests()
        assert [bytes(part) for part in request.attachments] == parts

    def test_attachments_without_bytes_need_no_chunk(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [b"", b""])
        written = ends.a.take_output()
        assert kinds_in(written) == ["request"]
        ends.b.receive(0.0, written)
        assert [bytes(part) for part in only(ends.b, native.REQUEST).attachments] == [b"", b""]


class TestWindow:
    def test_large_requests_wait_for_responses_to_earlier_ones(self) -> None:
        ends = Ends(a={"max_window_bytes": 2 * BIG})
        for body in (b"1", b"2", b"3"):
            ends.a.call(0.0, METHOD, body, [pattern(BIG)])
        ends.a.call(0.0, METHOD, b"small")
        first = ends.requests()
        assert sorted(request.body for request in first) == [b"1", b"2", b"small"]
        assert ends.a.statistics()["kept_back"] == 1
        ends.b.respond(first[0].id, b"")
        assert not ends.requests() or ends.a.statistics()["kept_back"] == 0
        for request in first[1:]:
            ends.b.respond(request.id, b"")
        ends.exchange()
        assert [event.body for event in of_kind(ends.b, native.REQUEST)] in ([b"3"], [])
        assert ends.a.statistics()["kept_back"] == 0

    def test_nested_requests_never_wait(self) -> None:
        ends = Ends(a={"max_window_bytes": BIG})
        ends.a.call(0.0, METHOD, b"outer", [pattern(BIG)])
        ends.a.call(0.0, METHOD, b"nested", [pattern(BIG)], None, True)
        assert len(ends.requests()) == 2

    def test_a_request_larger_than_the_window_goes_alone(self) -> None:
        ends = Ends(a={"max_window_bytes": 1000})
        ends.a.call(0.0, METHOD, b"1", [pattern(BIG)])
        ends.a.call(0.0, METHOD, b"2", [pattern(BIG)])
        for expected in (b"1", b"2"):
            (request,) = ends.requests()
            assert request.body == expected
            ends.b.respond(request.id, b"")
            ends.exchange()
            of_kind(ends.a, native.RESPONSE)

    @pytest.mark.parametrize("how", ["withdraw", "expire"])
    def test_a_waiting_request_that_is_given_up_lets_others_pass(self, how: str) -> None:
        ends = Ends(a={"max_window_bytes": 3 * BIG})
        ends.a.call(0.0, METHOD, b"in flight", [pattern(2 * BIG)])
        waiting = ends.a.call(0.0, METHOD, b"too large", [pattern(3 * BIG)], 1.0)
        ends.a.call(0.0, METHOD, b"fits", [pattern(BIG)])
        assert [request.body for request in ends.requests()] == [b"in flight"]
        if how == "withdraw":
            ends.a.withdraw(0.0, waiting)
        else:
            ends.wait(1.0)
            assert only(ends.a, native.EXPIRED).id == waiting
        assert [request.body for request in ends.requests()] == [b"fits"]

    def test_requests_that_do_not_wait_for_a_connection_fail_without_one(self) -> None:
        ends = Ends(a={"max_window_bytes": BIG})
        first = ends.a.call(0.0, METHOD, b"", [pattern(BIG)])
        waiting = [
            ends.a.call(0.0, METHOD, b"", [pattern(BIG)], None, False, False, None, False) for _ in range(3)
        ]
        ends.exchange()
        ends.a.detach()
        ends.a.withdraw(0.0, first)
        assert [event.id for event in of_kind(ends.a, native.UNREACHABLE)] == waiting
        assert ends.a.statistics()["bytes_in_window"] == ends.a.statistics()["kept_back"] == 0

    def test_the_limit_may_change(self) -> None:
        ends = Ends()
        ends.a.limit_window(0.0, BIG)
        ends.a.call(0.0, METHOD, b"1", [pattern(BIG)])
        ends.a.call(0.0, METHOD, b"2", [pattern(BIG)])
        assert [request.body for request in ends.requests()] == [b"1"]
        ends.a.limit_window(0.0, 0)
        assert [request.body for request in ends.requests()] == [b"2"]


class TestQuota:
    def test_a_request_beyond_the_quota_is_refused_and_sent_again(self) -> None:
        ends = Ends(b={"max_quota_bytes": 2 * BIG})
        for body in (b"1", b"2", b"3"):
            ends.a.call(0.0, METHOD, body, [pattern(BIG)])
        first = ends.requests()
        assert [request.body for request in first] == [b"1", b"2"]
        for request in first:
            ends.b.begin(request.id)
        assert ends.a.statistics()["retries"] == 1
        ends.wait(0.2)  # 0.1 s, with jitter
        assert [request.body for request in ends.requests()] == [b"3"]

    def test_sessions_share_a_budget(self) -> None:
        budget = native.Budget(max_bytes=2 * BIG)
        one, two = Ends(b={"budget": budget}), Ends(b={"budget": budget})
        one.a.call(0.0, METHOD, b"", [pattern(2 * BIG)])
        (request,) = one.requests()
        two.a.call(0.0, METHOD, b"", [pattern(BIG)])
        assert not two.requests()
        one.b.begin(request.id)
        assert budget.used == 0
        two.wait(0.2)
        assert len(two.requests()) == 1
        two.b.end()
        assert budget.used == 0

    def test_what_had_partly_arrived_no_longer_counts_after_a_cut(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [pattern(3 * BIG)])
        ends.deliver(ends.a, 1)
        assert ends.b.statistics()["quota_bytes"] == 3 * BIG
        ends.b.detach()
        assert ends.b.statistics()["quota_bytes"] == 0

    def test_a_refused_request_is_sent_again_until_its_deadline(self) -> None:
        ends = Ends()
        handle = ends.a.call(0.0, METHOD, b"", [], 1.0)
        refusals = 0
        while not (events := ends.a.take_events()):
            for request in ends.requests():
                ends.b.fail(request.id, REFUSAL)
                refusals += 1
            ends.exchange()
            ends.wait(1 / 32)
        assert (events[0].kind, events[0].id, events[0].body) == (native.ERROR, handle, REFUSAL)
        assert 6 <= refusals <= 20
        assert ends.now <= 1.0

    def test_a_request_that_ran_is_not_sent_again(self) -> None:
        ends = Ends()
        ran = link_pb2.Error(
            code=link_pb2.Error.CODE_RESOURCE_EXHAUSTED, retry_after_seconds=0.1
        ).SerializeToString()
        ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        ends.b.fail(request.id, ran)
        ends.exchange()
        assert only(ends.a, native.ERROR).body == ran

    def test_without_memory_a_request_is_refused(self) -> None:
        request = link_pb2.Request(id=1, method=METHOD, attachments=[1 << 39])
        chunk = link_pb2.Chunk(message=1, data=b"x")
        envelope = link_pb2.Envelope(frames=[link_pb2.Frame(request=request), link_pb2.Frame(chunk=chunk)])
        unlimited = new_session(max_quota_bytes=1 << 62)
        unlimited.attach(0.0)
        resource = pytest.importorskip("resource")
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, before[1]))
        try:
            unlimited.receive(0.0, envelope.SerializeToString())
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        (frame,) = frames_in(unlimited.take_output())
        assert frame.response.error.SerializeToString() == NO_MEMORY
        assert unlimited.statistics()["quota_bytes"] == 0


class TestChecks:
    def test_the_last_bytes_wait_for_the_check(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [pattern(2 * BIG)], None, False, True, "the call")
        assert not ends.requests()
        check = only(ends.a, native.CHECK)
        assert (check.flag, check.cookie) == (False, "the call")
        ends.a.confirm(check.id)
        (request,) = ends.requests()
        assert bytes(request.attachments[0]) == pattern(2 * BIG)

    def test_what_is_written_after_the_check_is_not_sent(self) -> None:
        ends = Ends()
        memory = bytearray(pattern(BIG))
        ends.a.call(0.0, METHOD, b"", [memory], None, False, True)
        ends.exchange()
        check = only(ends.a, native.CHECK)
        memory[-10:] = bytes(10)
        ends.a.confirm(check.id)
        (request,) = ends.requests()
        assert bytes(request.attachments[0]) == pattern(BIG)

    def test_a_request_that_was_modified_never_arrives(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [pattern(BIG)], None, False, True)
        ends.exchange()
        ends.a.reject(0.0, only(ends.a, native.CHECK).id, FAILED)
        assert not ends.requests()
        assert ends.a.statistics()["calls"] == 0

    def test_a_response_that_was_modified_arrives_as_an_error(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        ends.b.respond(request.id, b"", [pattern(BIG)], True, "the response")
        ends.exchange()
        check = only(ends.b, native.CHECK)
        assert (check.flag, check.cookie) == (True, "the response")
        ends.b.reject(0.0, check.id, FAILED)
        ends.exchange()
        assert only(ends.a, native.ERROR).body == FAILED

    def test_it_is_checked_again_after_a_cut(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [pattern(BIG)], None, False, True)
        ends.exchange()
        before = only(ends.a, native.CHECK)
        ends.reconnect()
        ends.exchange()
        after = only(ends.a, native.CHECK)
        ends.a.confirm(before.id)  # of bytes that nobody sends any more
        ends.a.reject(0.0, before.id, FAILED)
        assert not ends.requests()
        ends.a.confirm(after.id)
        assert len(ends.requests()) == 1


class TestAcknowledgements:
    def test_they_leave_with_the_next_frame(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"")
        ends.serve(lambda request: [b""])
        assert not ends.a.has_output
        assert ends.b.statistics()["inbound_calls"] == 1
        ends.a.call(0.0, METHOD, b"")
        assert kinds_in(ends.a.take_output()) == ["acknowledge", "request"]

    def test_large_responses_are_acknowledged_at_once(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"")
        (request,) = ends.requests()
        ends.b.respond(request.id, b"", [pattern(BIG)])
        assert not ends.b.all_delivered
        ends.exchange()
        assert ends.b.all_delivered
        assert ends.b.statistics()["inbound_calls"] == 0

    def test_many_small_ones_do_not_pile_up(self) -> None:
        ends = Ends()
        for _ in range(1000):
            ends.a.call(0.0, METHOD, b"")
        ends.serve(lambda request: [b""])
        assert ends.b.statistics()["inbound_calls"] < 32


class TestTheEnd:
    def test_a_goodbye_follows_what_waits(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"last")
        ends.a.close(FAILED, True)
        assert ends.a.ended
        assert ends.a.call(0.0, METHOD, b"more") == 0
        ends.exchange()
        request, goodbye = ends.b.take_events()
        assert request.body == b"last"
        assert (goodbye.kind, goodbye.body, goodbye.flag) == (native.GOODBYE, FAILED, True)
        ends.b.receive(0.0, b"anything")  # is not read any more

    def test_a_goodbye_does_not_wait_for_a_request_that_came_with_it_to_be_served(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"last")
        ends.a.close()
        ends.exchange()
        assert not ends.b.take_events(0, 0)
        assert [event.kind for event in ends.b.take_events(0, 1)] == [native.REQUEST]
        assert [event.kind for event in ends.b.take_events(0, 0)] == [native.GOODBYE]

    def test_the_calls_that_a_goodbye_ends_are_known(self) -> None:
        ends = Ends()
        ends.b.call(0.0, METHOD, b"", [], None, False, False, "open")
        withdrawn = ends.b.call(0.0, METHOD, b"", [], None, False, False, "withdrawn")
        ends.exchange()
        ends.b.withdraw(0.0, withdrawn)
        ends.a.close()
        ends.deliver(ends.a)
        only(ends.b, native.GOODBYE)
        assert ends.b.open_calls() == ["open"]

    def test_a_closed_session_reads_nothing_more(self) -> None:
        ends = Ends()
        ends.b.call(0.0, METHOD, b"", [pattern(BIG)])
        ends.a.close()
        ends.deliver(ends.b)
        assert not ends.a.take_events()
        counts = ends.a.statistics()
        assert counts["inbound_calls"] == counts["quota_bytes"] == 0

    def test_nothing_is_left_of_an_ended_session(self) -> None:
        ends = Ends()
        ends.a.call(0.0, METHOD, b"", [pattern(BIG)], 5.0)
        ends.requests()
        for session in (ends.a, ends.b):
            session.end()
            assert session.next_tick is None
            assert not session.has_output
            counts = session.statistics()
            assert not any(
                counts[name] for name in ("calls", "inbound_calls", "bytes_in_window", "quota_bytes")
            )


class TestLimits:
    def break_protocol(self, match: str, *frames: link_pb2.Frame, **settings: int) -> None:
        session = new_session(**settings)
        session.attach(0.0)
        with pytest.raises(native.ProtocolError, match=match):
            session.receive(0.0, link_pb2.Envelope(frames=frames).SerializeToString())

    def test_of_bodies(self) -> None:
        request = link_pb2.Request(id=1, body=bytes(1001))
        self.break_protocol("limit of 1000 bytes", link_pb2.Frame(request=request), max_body_bytes=1000)

    def test_of_frames_before_they_have_arrived(self) -> None:
        session = new_session(max_body_bytes=1000)
        session.attach(0.0)
        with pytest.raises(native.ProtocolError, match="limit of 1000 bytes"):
            session.receive(0.0, b"\x0a\xff\xff\xff\xff\x0f\x1a")

    @pytest.mark.parametrize("sizes", [[1001], [600, 600], [(1 << 64) - 1, 2]])
    def test_of_messages(self, sizes: list[int]) -> None:
        request = link_pb2.Request(id=1, attachments=sizes)
        self.break_protocol("limit of 1000 bytes", link_pb2.Frame(request=request), max_message_bytes=1000)

    def test_of_attachments(self) -> None:
        request = link_pb2.Request(id=1, attachments=[0] * (native.MOST_ATTACHMENTS + 1))
        self.break_protocol("attachments", link_pb2.Frame(request=request))

    @pytest.mark.parametrize("kind", ["request", "cancel"])
    def test_of_requests_without_acknowledgement(self, kind: str) -> None:
        message = {"request": link_pb2.Request, "cancel": link_pb2.Cancel}[kind]
        frames = [link_pb2.Frame(**{kind: message(id=id)}) for id in range(1, 12)]
        self.break_protocol("more than 10 requests", *frames, max_inbound_calls=10)

    def test_of_chunks(self) -> None:
        request = link_pb2.Frame(request=link_pb2.Request(id=1, attachments=[3]))
        chunk = link_pb2.Frame(chunk=link_pb2.Chunk(message=1, data=b"four"))
        self.break_protocol("more bytes than the message announced", request, chunk)

    def test_of_requests_at_once(self) -> None:
        request = link_pb2.Frame(request=link_pb2.Request(id=1, attachments=[3]))
        self.break_protocol("twice at once", request, request)

    def test_of_attachments_that_are_small(self) -> None:
        """They count with what they take in memory."""
        session = new_session(max_quota_bytes=1_000_000)
        session.attach(0.0)
        requests = [link_pb2.Request(id=id, attachments=[0] * 5000) for id in (1, 2)]
        frames = [link_pb2.Frame(request=request) for request in requests]
        session.receive(0.0, link_pb2.Envelope(frames=frames).SerializeToString())
        assert len(of_kind(session, native.REQUEST)) == 1
        (frame,) = frames_in(session.take_output())
        assert frame.response.error.SerializeToString() == REFUSAL

    def test_of_numbers(self) -> None:
        many = link_pb2.Acknowledge(ids=[1] * (17 << 20))
        self.break_protocol("too many numbers", link_pb2.Frame(acknowledge=many))

    def test_of_responses(self) -> None:
        for id in (0, 1):
            response = link_pb2.Response(id=id, body=b"")
            self.break_protocol("not sent", link_pb2.Frame(response=response))

    def test_of_repeated_responses(self) -> None:
        session = new_session(max_inbound_calls=100)
        session.attach(0.0)
        session.call(0.0, METHOD, b"")
        session.take_output()
        again = link_pb2.Envelope(frames=[link_pb2.Frame(response=link_pb2.Response(id=1, body=b""))])
        with pytest.raises(native.ProtocolError, match="not read"):
            session.receive(0.0, again.SerializeToString() * 200)

    def test_of_acknowledgements(self) -> None:
        """A peer that acknowledges what it cannot have got would have us keep no count of it."""
        cancel = link_pb2.Frame(cancel=link_pb2.Cancel(id=1))
        acknowledge = link_pb2.Frame(acknowledge=link_pb2.Acknowledge(ids=[1]))
        self.break_protocol("not sent", cancel, acknowledge)

    def test_of_time_for_ids_that_a_peer_chooses(self) -> None:
        """Multiples of a number of hash buckets, say: it must not take longer than with other ids."""

        def seconds(step: int) -> float:
            session = new_session()
            session.attach(0.0)
            cancels = [link_pb2.Frame(cancel=link_pb2.Cancel(id=i * step)) for i in range(1, 20_000)]
            data = link_pb2.Envelope(frames=cancels).SerializeToString()
            before = time.thread_time()
            session.receive(0.0, data)
            return time.thread_time() - before

        primes = (10_273, 20_753, 42_043, 85_229)
        assert min(max(seconds(prime) for prime in primes) for _ in range(3)) < 10 * max(
            seconds(1) for _ in range(3)
        )

    def test_of_ids(self) -> None:
        self.break_protocol("without an id", link_pb2.Frame(request=link_pb2.Request()))

    def test_chunks_of_nothing_are_skipped(self) -> None:
        session = new_session()
        session.attach(0.0)
        chunks = [
            link_pb2.Frame(chunk=link_pb2.Chunk(message=5, of_response=side, data=b"x" * 9))
            for side in (True, False)
        ]
        session.receive(0.0, link_pb2.Envelope(frames=chunks).SerializeToString())
        assert not session.take_events()


def only_acknowledged(session: native.Link) -> list[int]:
    events = session.take_events()
    assert all(event.kind == native.ACKNOWLEDGED for event in events)
    return [event.id for event in events]


def test_a_responder_learns_that_its_response_has_arrived() -> None:
    ends = Ends()
    ends.a.call(0.0, METHOD, b"")
    (request,) = ends.requests()
    ends.b.respond(request.id, b"", [pattern(BIG)])
    ends.deliver(ends.b)
    assert only_acknowledged(ends.b) == []
    ends.deliver(ends.a)
    assert only_acknowledged(ends.b) == [request.id]


def test_a_cancelled_request_gets_the_error_for_it() -> None:
    ends = Ends()
    handle = ends.a.call(0.0, METHOD, b"", [pattern(3 * BIG)])
    ends.deliver(ends.a, 1)
    ends.a.withdraw(0.0, handle)
    ends.deliver(ends.a)
    (frame,) = frames_in(ends.b.take_output())
    assert frame.response.error.SerializeToString() == CANCELLED


def test_memory_is_let_go_after_an_error() -> None:
    session = new_session()
    memory = bytearray(5)
    with pytest.raises(TypeError):
        session.call(0.0, METHOD, b"", [memory, 5])  # type: ignore[list-item]
    memory.append(1)  # refused while somebody holds it


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="refusal"):
        native.Link(seed=1)  # type: ignore[call-arg]
    for wrong in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            new_session(max_message_bytes=wrong)
    with pytest.raises(ValueError, match="max_body_bytes"):
        new_session(max_body_bytes=(1 << 64) - 1)
    with pytest.raises(ValueError, match="chunk_bytes"):
        new_session(chunk_bytes=0)
