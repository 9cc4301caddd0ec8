"""The short form of a call whose plan the receiver keeps (`wire.plans`): what all calls of the plan have in
common is left out."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError

from gradwire import wire
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.errors import MalformedMessage
from gradwire.wire.ids import AutogradMessageId

__all__ = ["ShortCall", "short_call"]

_HEAD = Struct("<BIH")
"""The mark of a short form, the number of the plan, and which numbers of results the requester knows."""


def short_call(
    plan: wire.SentPlan, flat: wire.Flat, metadata: AutogradMetadata, released: Sequence[AutogradMessageId]
) -> tuple[bytes, list[wire.Attachment]]:
    """The body and the attachments of a request."""
    content, attachments = plan.layout.write(flat)
    head = _HEAD.pack(wire.MARK, plan.number, plan.known_results)
    return b"".join((head, metadata.in_short(released), content)), attachments


class ShortCall:
    """A request that came in short."""

    __slots__ = ("_at", "_body", "known_results", "metadata", "plan", "released")

    def __init__(self, body: bytes, plans: wire.Plans) -> None:
        try:
            _, number, self.known_results = _HEAD.unpack_from(body)
        except StructError as error:
            raise MalformedMessage(f"a request of {len(body)} bytes") from error
        self.plan = plans.received(number)
        self.metadata, self.released, self._at = AutogradMetadata.from_short(body, _HEAD.size)
        self._body = body

    def values(self, attachments: Sequence[wire.Buffer]) -> wire.PlannedValues:
        """The arguments, then the keyword arguments."""
        return self.plan.layout.read(self._body, self._at, attachments)
