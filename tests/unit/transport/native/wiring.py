"""Two native sessions, and a connection between them that tests hold in their hands: bytes move when a test
says so, and time is a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gradwire.proto.v1 import link_pb2
from gradwire.transport import native

REFUSAL = link_pb2.Error(
    code=link_pb2.Error.CODE_RESOURCE_EXHAUSTED, message="too much", not_started=True, retry_after_seconds=0.1
).SerializeToString()
CANCELLED = link_pb2.Error(code=link_pb2.Error.CODE_CANCELLED, message="cancelled").SerializeToString()
NO_MEMORY = link_pb2.Error(
    code=link_pb2.Error.CODE_RESOURCE_EXHAUSTED, message="no memory"
).SerializeToString()
FAILED = link_pb2.Error(code=link_pb2.Error.CODE_RAISED, message="it failed").SerializeToString()

METHOD = link_pb2.METHOD_FORWARD_WITH_AUTOGRAD


def new_session(seed: int = 1, **settings: Any) -> native.Link:
    return native.Link(refusal=REFUSAL, cancelled=CANCELLED, no_memory=NO_MEMORY, seed=seed, **settings)


def frames_in(data: bytes) -> list[link_pb2.Frame]:
    return list(link_pb2.Envelope.FromString(data).frames)


def kinds_in(data: bytes) -> list[str]:
    return [str(frame.WhichOneof("kind")) for frame in frames_in(data)]


class Ends:
    """Two sessions. `a` and `b` are alike; what one puts out goes to the other with `exchange`."""

    def __init__(self, a: dict[str, Any] | None = None, b: dict[str, Any] | None = None) -> None:
        self.now = 0.0
        self.a = new_session(**(a or {}))
        self.b = new_session(seed=2, **(b or {}))
        self.reconnect()

    def reconnect(self) -> None:
        """Cuts the connection, with all that is under way, and makes a new one."""
        for session in (self.a, self.b):
            session.detach()
            session.attach(self.now)

    def deliver(self, sender: native.Link, at_most: int = 1 << 62) -> int:
        """Moves what one session puts out to the other. Returns how many writes that were."""
        receiver = self.b if sender is self.a else self.a
        writes = 0
        while writes < at_most and sender.has_output:
            receiver.receive(self.now, sender.take_output())
            writes += 1
        return writes

    def exchange(self) -> None:
        """Moves everything in both directions until nothing is left."""
        while self.deliver(self.a) + self.deliver(self.b):
            pass

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for session in (self.a, self.b):
            session.tick(self.now)

    def requests(self) -> list[native.Event]:
        """The requests that have arrived at `b`."""
        self.exchange()
        return of_kind(self.b, native.REQUEST)

    def serve(self, answer: Callable[[native.Event], Iterable[Any]]) -> list[native.Event]:
        """Lets `b` respond to all requests, and returns what happened at `a`."""
        for request in self.requests():
            self.b.respond(request.id, *answer(request))
        self.exchange()
        return self.a.take_events()


def of_kind(session: native.Link, kind: int) -> list[native.Event]:
    """What happened, and that it is all of one kind; but for acknowledgements, which come at any time."""
    events = [event for event in session.take_events() if event.kind != native.ACKNOWLEDGED]
    assert all(event.kind == kind for event in events), events
    return events


def only(session: native.Link, kind: int) -> native.Event:
    (event,) = of_kind(session, kind)
    return event
