"""Two sessions under everything at once: cuts at any byte, cancellations, deadlines, refusals, modified
memory, both peers calling, windows and quotas that are too small. A model beside them knows what has to come
out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gradwire.transport import native

from .wiring import CANCELLED, FAILED, METHOD, REFUSAL, new_session

SIZES = [[], [], [0], [10], [100, 0, 7], [5000], [64 * 1024], [70_000], [1, 300_000, 2], [700_000]]


def content(key: bytes, index: int, size: int) -> bytes:
    """The bytes of an attachment of a message."""
    unit = key + bytes([index])
    return (unit * (size // len(unit) + 1))[:size]


@dataclass
class Call:
    key: bytes
    sizes: list[int]
    deadline: float | None
    withdrawn: bool = False
    outcome: native.Event | None = None
    discarded: int = 0


@dataclass
class Peer:
    """One peer and what its application does. `served` counts how often each request of the other one ran."""

    name: str
    session: native.Link
    draw: random.Random
    calls: dict[int, Call] = field(default_factory=dict)
    served: Counter[bytes] = field(default_factory=Counter)
    refused: Counter[bytes] = field(default_factory=Counter)
    open_requests: dict[int, native.Event] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    unconfirmed: list[int] = field(default_factory=list)
    expected_errors: set[bytes] = field(default_factory=set)
    count: int = 0

    def call(self, now: float) -> None:
        self.count += 1
        key = f"{self.name}{self.count}.".encode()
        sizes = self.draw.choice(SIZES)
        timeout = self.draw.choice([None, None, None, 0.5, 3.0])
        parts = [content(key, index, size) for index, size in enumerate(sizes)]
        nested, checked = self.draw.random() < 0.2, self.draw.random() < 0.3
        handle = self.session.call(now, METHOD, key, parts, timeout, nested, checked, key)
        self.calls[handle] = Call(key, sizes, None if timeout is None else now + timeout)

    def withdraw_one(self, now: float) -> None:
        waiting = [
            handle for handle, call in self.calls.items() if call.outcome is None and not call.withdrawn
        ]
        if waiting:
            handle = self.draw.choice(waiting)
            self.calls[handle].withdrawn = True
            assert self.session.withdraw(now, handle)

    def respond_to_one(self) -> None:
        if not self.open_requests:
            return
        id = self.draw.choice(list(self.open_requests))
        request = self.open_requests.pop(id)
        self.session.begin(id)
        kind = self.draw.random()
        if kind < 0.1:
            self.served[request.body] -= 1  # refused before anything ran
            self.refused[request.body] += 1
            self.session.fail(id, REFUSAL)
        elif kind < 0.2:
            self.expected_errors.add(request.body)
            self.session.fail(id, FAILED)
        else:
            sizes = self.draw.choice(SIZES)
            parts = [content(request.body, index, size) for index, size in enumerate(sizes)]
            body = request.body + repr(sizes).encode()
            wanted = self.session.respond(id, body, parts, self.draw.random() < 0.3)
            assert wanted == (id not in self.cancelled)

    def answer_a_check(self, now: float) -> None:
        if not self.unconfirmed:
            return
        check = self.unconfirmed.pop(self.draw.randrange(len(self.unconfirmed)))
        if self.draw.random() < 0.8:
            self.session.confirm(check)
            return
        calls = self.session.statistics()["calls"]
        before = set(self.session.open_calls())
        self.session.reject(now, check, FAILED)
        for key in before - set(self.session.open_calls()):
            (call,) = [call for call in self.calls.values() if call.key == key]
            call.withdrawn = True
        assert self.session.statistics()["calls"] in (calls, calls - 1)

    def handle_events(self, now: float) -> None:
        for event in self.session.take_events():
            if event.kind == native.REQUEST:
                self.served[event.body] += 1
                assert event.id not in self.open_requests
                self.check_attachments(event.body, event)
                self.open_requests[event.id] = event
            elif event.kind == native.ACKNOWLEDGED:
                assert event.id not in self.open_requests
                assert event.id not in self.acknowledged
                self.acknowledged.add(event.id)
            elif event.kind == native.CANCELLED:
                assert event.id not in self.cancelled
                self.cancelled.add(event.id)
            elif event.kind == native.CHECK:
                self.unconfirmed.append(event.id)
            elif event.kind == native.DISCARDED:
                call = self.calls[event.id]
                assert call.withdrawn or (call.outcome is not None and call.outcome.kind == native.EXPIRED)
                call.discarded += 1
                assert call.discarded == 1
            else:
                assert event.kind in (native.RESPONSE, native.ERROR, native.EXPIRED)
                call = self.calls[event.id]
                assert event.cookie == call.key
                assert call.outcome is None
                assert not call.withdrawn
                call.outcome = event
                if event.kind == native.EXPIRED:
                    assert call.deadline is not None
                    assert call.deadline <= now
                elif call.deadline is not None:
                    assert now < call.deadline
                if event.kind == native.RESPONSE:
                    assert event.body.startswith(call.key)
                    self.check_attachments(call.key, event, eval(event.body[len(call.key) :]))

    def check_attachments(self, key: bytes, event: native.Event, sizes: list[int] | None = None) -> None:
        if sizes is not None:
            assert [len(part) for part in event.attachments] == sizes
        for index, part in enumerate(event.attachments):
            assert bytes(part) == content(key, index, len(part))


class World:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        small = self.draw.random() < 0.5
        settings = {"max_window_bytes": 800_000, "max_quota_bytes": 700_000} if small else {}
        chunk = self.draw.choice([10_000, 50_000, 256 * 1024])
        self.peers = [
            Peer(
                name,
                new_session(seed * 2 + index, chunk_bytes=chunk, **settings),
                random.Random(seed * 2 + index),
            )
            for index, name in enumerate("ab")
        ]
        self.now = 0.0
        # The bytes under way to each peer, by its index.
        self.under_way = [bytearray(), bytearray()]
        self.cut()

    def cut(self) -> None:
        """Both peers notice, and both connect anew. What was under way is lost."""
        for peer in self.peers:
            peer.session.detach()
        self.under_way = [bytearray(), bytearray()]
        for peer in self.peers:
            peer.session.attach(self.now)

    def move(self, index: int, size: int) -> None:
        """Lets a peer write once, and the other one read some of what is under way to it."""
        self.under_way[1 - index] += self.peers[index].session.take_output()
        data = self.under_way[1 - index]
        self.peers[1 - index].session.receive(self.now, bytes(data[:size]), self.draw.random() < 0.5)
        del data[:size]

    def step(self, calling: bool) -> None:
        peer = self.draw.choice(self.peers)
        kind = self.draw.random()
        if kind < 0.12 and calling:
            peer.call(self.now)
        elif kind < 0.15 and calling:
            peer.withdraw_one(self.now)
        elif kind < 0.30:
            peer.respond_to_one()
        elif kind < 0.40:
            peer.answer_a_check(self.now)
        elif kind < 0.45:
            self.now += self.draw.choice([0.001, 0.05, 0.3])
            for each in self.peers:
                each.session.tick(self.now)
        elif kind < 0.46 and calling:
            self.cut()
        else:
            self.move(self.draw.randrange(2), self.draw.choice([1, 30, 1000, 100_000, 1 << 30]))
        for each in self.peers:
            each.handle_events(self.now)

    def settle(self) -> None:
        """No further calls and cuts: everything has to come to an end."""
        for _ in range(100_000):
            busy = any(self.under_way) or any(
                peer.session.has_output
                or peer.open_requests
                or peer.unconfirmed
                or peer.session.statistics()["calls"]
                for peer in self.peers
            )
            if not busy:
                return
            self.step(calling=False)
        raise AssertionError([(peer.session.statistics(), len(peer.open_requests)) for peer in self.peers])

    def check(self) -> None:
        for peer, other in (self.peers, reversed(self.peers)):
            for call in peer.calls.values():
                assert other.served[call.key] in (0, 1), call
                outcome = call.outcome
                if call.withdrawn:
                    assert outcome is None
                    continue
                assert outcome is not None, call
                if outcome.kind == native.RESPONSE:
                    assert other.served[call.key] == 1
                elif outcome.kind == native.ERROR:
                    assert outcome.body in (FAILED, REFUSAL)
                    assert outcome.body != CANCELLED
            counts = peer.session.statistics()
            assert counts["bytes_in_window"] == counts["quota_bytes"] == counts["kept_back"] == 0
            assert counts["inbound_calls"] < 32, "what is not acknowledged yet"
            assert peer.session.all_delivered


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_calls_end_once_and_requests_run_once(seed: int) -> None:
    world = World(seed)
    for _ in range(world.draw.choice([200, 1500])):
        world.step(calling=True)
    world.settle()
    world.check()


def test_the_seeds_above_reach_what_they_are_for() -> None:
    """A model that never gets there would find nothing."""
    reached: Counter[str] = Counter()
    for seed in range(60, 75):
        world = World(seed)
        for _ in range(1500):
            world.step(calling=True)
        world.settle()
        for peer in world.peers:
            counts = peer.session.statistics()
            for name in ("repeated_requests", "repeated_responses", "retries"):
                reached[name] += counts[name]
            reached["refused"] += sum(peer.refused.values())
            reached["withdrawn"] += sum(call.withdrawn for call in peer.calls.values())
            reached["discarded"] += sum(call.discarded for call in peer.calls.values())
            reached["cancelled"] += len(peer.cancelled)
            for call in peer.calls.values():
                if call.outcome is not None:
                    reached[f"outcome {call.outcome.kind}"] += 1
    missing = {
        name
        for name in (
            "repeated_requests",
            "repeated_responses",
            "retries",
            "refused",
            "withdrawn",
            "discarded",
            "cancelled",
            f"outcome {native.RESPONSE}",
            f"outcome {native.ERROR}",
            f"outcome {native.EXPIRED}",
        )
        if reached[name] < 5
    }
    assert not missing, reached
