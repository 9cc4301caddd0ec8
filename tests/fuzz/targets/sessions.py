"""The bytes of a session, as the native module reads them: what `native/fuzz` does, through Python."""

from __future__ import annotations

from random import Random

from google.protobuf.message import DecodeError
from tests.fuzz.inputs import Input
from tests.fuzz.target import Target
from tests.unit.transport.native.wiring import FAILED, Ends, new_session

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import link_pb2
from gradwire.transport import native

__all__ = ["Sessions"]


class Sessions(Target):
    """Each part is what one read from a socket brings."""

    name = "sessions"
    refuses = (native.ProtocolError, MalformedMessage)
    kinds = (link_pb2.Envelope,)
    most_parts = 12

    def corpus(self) -> dict[str, Input]:
        written: dict[str, list[bytes]] = {"a": [], "b": []}
        ends = Ends()

        def exchange() -> None:
            while ends.a.has_output or ends.b.has_output:
                for name, sender, receiver in (("a", ends.a, ends.b), ("b", ends.b, ends.a)):
                    if sender.has_output:
                        written[name].append(data := sender.take_output())
                        receiver.receive(0.0, data)

        for attachments in ((), (bytes(16),), (bytes(5000), b"", bytes(3))):
            ends.a.call(0.0, 1, b"body", attachments, 5.0)
            exchange()
            for event in ends.b.take_events():
                ends.b.respond(event.id, b"response", attachments)
            exchange()
            ends.a.take_events()
        handle = ends.a.call(0.0, 1, b"to be cancelled")
        ends.a.withdraw(0.0, handle)
        ends.a.call(0.0, 2, b"to fail", (bytes(100),))
        exchange()
        for event in ends.b.take_events():
            if event.kind == native.REQUEST:
                ends.b.fail(event.id, FAILED)
        exchange()
        ends.a.close(FAILED, True)
        exchange()
        return {name: tuple(parts) for name, parts in written.items()}

    def run(self, parts: Input) -> object:
        session = new_session(max_body_bytes=1 << 20, max_message_bytes=1 << 24, max_inbound_calls=1000)
        session.attach(0.0)
        # Some calls of its own, to which responses may come.
        for attachments in ((), (bytes(16),), (bytes(5000), b"", bytes(3))):
            session.call(0.0, 1, b"body", attachments, 5.0)
        session.call(0.0, 2, b"more")
        session.take_output()
        random = Random(len(parts))
        try:
            for now, part in enumerate(parts):
                session.receive(float(now), part)
                for event in session.take_events():
                    self._handle(random, session, event)
                session.tick(float(now))
                while session.has_output:
                    session.take_output(1 << 16, 1 << 16)
                session.statistics()
        finally:
            session.end()
        return None

    @staticmethod
    def _handle(random: Random, session: native.Link, event: native.Event) -> None:
        for block in event.attachments:
            bytes(block)
        if event.kind == native.REQUEST:
            session.begin(event.id)
            if random.random() < 0.5:
                session.respond(event.id, b"response", event.attachments)
            else:
                session.fail(event.id, FAILED)
        elif event.kind in (native.ERROR, native.GOODBYE) and event.body:
            try:
                link_pb2.Error.FromString(event.body)
            except DecodeError:
                pass  # the link says goodbye
        if event.kind == native.CHECK:
            session.confirm(event.id)
