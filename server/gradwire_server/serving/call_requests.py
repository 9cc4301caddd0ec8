"""The request of a call and its response: in full, as messages of the contract, or in short, by a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradwire import wire
from gradwire.autograd import (
    AutogradMessageId,
    AutogradMetadata,
    FullResponse,
    Response,
    ShortCall,
    ShortResponse,
    message_ids,
)
from gradwire.proto.v1 import autograd_pb2

if TYPE_CHECKING:
    import torch

    from gradwire.transport import Link

__all__ = ["CallRequest", "CallResult"]


class CallRequest:
    """A request of a call, as it came."""

    __slots__ = ("_plans", "known_results", "message", "metadata", "plan", "released", "short")

    def __init__(self, body: bytes, link: Link | None) -> None:
        self._plans = None if link is None else link.plans
        self.short: ShortCall | None = None
        """Set if the request came in short."""
        self.plan: wire.ReceivedPlan | None = None
        self.known_results = 0
        """Which structures of results the requester knows, as bits."""
        self.message: autograd_pb2.ForwardWithAutogradRequest
        """In short: what all calls of the plan have in common, without arguments."""
        self.metadata: AutogradMetadata | None = None
        """None where gradients are not recorded."""
        self.released: Sequence[AutogradMessageId]
        if self._plans is not None and wire.is_short(body):
            short = self.short = ShortCall(body, self._plans)
            self.plan, self.known_results = short.plan, short.known_results
            self.message, self.metadata, self.released = short.plan.request, short.metadata, short.released
            return
        self.message = wire.parse(autograd_pb2.ForwardWithAutogradRequest, body)
        self.released = message_ids(self.message.released)
        if self.message.HasField("autograd"):
            self.metadata = AutogradMetadata.parse(self.message.autograd)

    def keep_plan(self, args: Sequence[object], kwargs: dict[str, object]) -> None:
        """Keeps the plan of a request in full, if it has one. `args` and `kwargs`: its arguments, which
        nothing has changed yet."""
        if not self.message.plan or self._plans is None:
            return
        flat = wire.flatten([*args, *kwargs.values()])
        if flat is not None:
            self.plan = self._plans.keep(self.message, list(kwargs), flat)

    def result_of(self, flat: wire.Flat) -> tuple[int, wire.Layout] | None:
        """The number and structure that a result has in the plan; None if it has none."""
        if self.plan is None or self._plans is None:
            return None
        return self.plan.result(self._plans, flat)


class CallResult:
    """A result, in the form in which it is sent."""

    __slots__ = ("_attachments", "_content", "_message", "_number", "saved", "tensors")

    def __init__(self, request: CallRequest, result: object, new_encoder: Callable[[], wire.Encoder]) -> None:
        self.tensors: Sequence[torch.Tensor]
        """The tensors in it."""
        self.saved = 0
        """How many bytes the codecs saved."""
        self._message: autograd_pb2.ForwardWithAutogradResponse | None = None
        self._number = 0
        if request.plan is not None:
            flat = wire.flatten([result])
            found = None if flat is None else request.result_of(flat)
            if flat is not None and found is not None:
                self._number, layout = found
                if request.known_results >> (self._number - 1) & 1:
                    self._content, self._attachments = layout.write(flat)
                    self.tensors = flat.tensors
                    return
        encoder = new_encoder()
        self._message = autograd_pb2.ForwardWithAutogradResponse(
            result=encoder.value(result, "result"),
            plan_is_kept=request.plan is not None,
            result_number=self._number,
        )
        table, self._attachments = encoder.finish()
        self._message.tensors.CopyFrom(table)
        self.tensors, self.saved = encoder.tensors, encoder.saved

    def response(self, metadata: AutogradMetadata | None) -> Response:
        if self._message is None:
            return ShortResponse(0, self._number, metadata, self._content, self._attachments)
        return FullResponse(self._message, self._attachments, metadata)
