"""Calls in short: a request in full that has a plan, then requests that name it. And results in short."""

from __future__ import annotations

import torch
from tests.fuzz.inputs import Input
from tests.fuzz.target import Target

from gradwire import wire
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.autograd.responses import ShortResponse, read_short, releases_of_discarded
from gradwire.autograd.short_calls import ShortCall, short_call
from gradwire.errors import ResourceExhausted, WireError
from gradwire.proto.v1 import autograd_pb2
from gradwire.wire.ids import AutogradMessageId, ContextId

__all__ = ["PlannedCalls", "PlannedResults"]

PLAN = 7
ARGUMENTS: dict[str, list[object]] = {
    "tensor": [torch.arange(4.0)],
    "scalars": [1, 2.5, True, "constant", None],
    "nested": [[torch.ones(2, 2), {"a": (1, torch.zeros(3, dtype=torch.int64))}], ("x", [])],
    "large": [torch.zeros(16_400), torch.ones(3)],
}


def _metadata() -> AutogradMetadata:
    metadata = AutogradMetadata(ContextId(5, 3, 8), AutogradMessageId(5, 4, 8), 2)
    metadata.depends_on = [AutogradMessageId(6, 1, 8), AutogradMessageId(6, 2, 8)]
    metadata.builds_on = [AutogradMessageId(6, 3, 8)]
    metadata.segment_handle = AutogradMessageId(6, 9, 8)
    return metadata


class PlannedCalls(Target):
    """The first part is the request in full; the others are requests in short, each with its attachments."""

    name = "planned-calls"
    refuses = (WireError, ResourceExhausted)
    kinds = (autograd_pb2.ForwardWithAutogradRequest, None)
    most_parts = 6

    def corpus(self) -> dict[str, Input]:
        inputs = {}
        for name, arguments in ARGUMENTS.items():
            flat = wire.flatten(arguments)
            assert flat is not None
            encoder = wire.Encoder(attach_from=None)
            request = autograd_pb2.ForwardWithAutogradRequest(
                function="f", plan=PLAN, args=[encoder.value(argument, "x") for argument in arguments]
            )
            table, _ = encoder.finish()
            request.tensors.CopyFrom(table)
            plan = wire.SentPlan(PLAN, wire.Layout(len(arguments), flat))
            body, attachments = short_call(plan, flat, _metadata(), [AutogradMessageId(5, 1, 8)])
            sent = [bytes(attachment.view) for attachment in attachments]
            inputs[name] = (request.SerializeToString(), body, *sent)
        return inputs

    def run(self, parts: Input) -> object:
        plans = wire.Plans()
        request = wire.parse(autograd_pb2.ForwardWithAutogradRequest, parts[0])
        decoder = wire.Decoder(request.tensors)
        arguments = [decoder.value(argument) for argument in request.args]
        flat = wire.flatten(arguments)
        if flat is not None and request.plan:
            plans.keep(request, (), flat)
        body, *attachments = parts[1:] or (b"",)
        if not wire.is_short(body):
            return None
        call = ShortCall(body, plans)
        return call.values([memoryview(bytearray(part)) for part in attachments]).values()


class PlannedResults(Target):
    """The first part is a response in full, the second one in short, the others are its attachments."""

    name = "planned-results"
    refuses = (WireError, ResourceExhausted)
    kinds = (autograd_pb2.ForwardWithAutogradResponse, None)
    most_parts = 6

    def corpus(self) -> dict[str, Input]:
        inputs = {}
        for name, results in ARGUMENTS.items():
            flat = wire.flatten([results])
            assert flat is not None
            encoder = wire.Encoder(attach_from=None)
            response = autograd_pb2.ForwardWithAutogradResponse(
                result=encoder.value(results, "result"), plan_is_kept=True, result_number=1
            )
            table, _ = encoder.finish()
            response.tensors.CopyFrom(table)
            content, attachments = wire.Layout(1, flat).write(flat)
            short = ShortResponse(0, 1, _metadata(), content, attachments).body([AutogradMessageId(5, 1, 8)])
            sent = [bytes(attachment.view) for attachment in attachments]
            inputs[name] = (response.SerializeToString(), short, *sent)
        return inputs

    def run(self, parts: Input) -> object:
        plans = wire.Plans()
        plan = wire.SentPlan(PLAN, wire.Layout(0, wire.Flat([], [], [])))
        full, short = (*parts, b"")[:2]
        response = wire.parse(autograd_pb2.ForwardWithAutogradResponse, full)
        result = wire.Decoder(response.tensors).value(response.result)
        plan.learn(plans, response, result)
        releases_of_discarded(autograd_pb2.ForwardWithAutogradResponse, short)
        if not wire.is_short(short):
            return None
        _, number, _, _, at = read_short(short)
        views = [memoryview(bytearray(part)) for part in parts[2:]]
        return plan.result(number).read(short, at, views).values()
