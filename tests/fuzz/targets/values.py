"""Values, and the tensors that they refer to: a ForwardWithAutogradResponse, then attachments."""

from __future__ import annotations

import numpy
import torch
from tests.fuzz.inputs import Input
from tests.fuzz.target import Target
from tests.fuzz.targets import samples
from tests.fuzz.targets.samples import TYPES, touch

from gradwire import wire
from gradwire.autograd.responses import releases_of_discarded
from gradwire.errors import ResourceExhausted, WireError
from gradwire.proto.v1 import autograd_pb2, value_pb2

__all__ = ["Values"]


class Values(Target):
    name = "values"
    refuses = (WireError, ResourceExhausted)
    kinds = (autograd_pb2.ForwardWithAutogradResponse, None)
    most_parts = 4
    words = (
        *("float32", "int1", "bits16", "qint8", "no_such_dtype", "cpu", "cuda:0", "cuda:9999", "meta", "hpu"),
        *("<f4", ">i8", "|b1", "|S3", "<U2", "<U10000000", "<M8[D]", "<m8[0s]", "<M8[999999999as]", "|O"),
        *(
            "Point",
            "Pair",
            "Colour",
            "Rights",
            "READ",
            "READ|WRITE",
            "RED",
            "x",
            "y",
            "tags",
            "left",
            "right",
        ),
    )

    def corpus(self) -> dict[str, Input]:
        return {
            f"{name}-{how}": self._encoded(value, attach_from)
            for name, value in samples.values().items()
            for how, attach_from in (("inline", None), ("attached", 0))
        }

    @staticmethod
    def _encoded(value: object, attach_from: int | None) -> Input:
        encoder = wire.Encoder(attach_from=attach_from, types=TYPES)
        message = autograd_pb2.ForwardWithAutogradResponse(result=encoder.value(value, "value"))
        table, attachments = encoder.finish()
        message.tensors.CopyFrom(table)
        return (message.SerializeToString(), *(bytes(attachment.view) for attachment in attachments))

    def run(self, parts: Input) -> object:
        body, *rest = parts
        attachments = [numpy.frombuffer(bytearray(part), numpy.uint8) for part in rest]
        refs: list[value_pb2.RemoteRef] = []
        releases_of_discarded(autograd_pb2.ForwardWithAutogradResponse, body)
        message = wire.parse(autograd_pb2.ForwardWithAutogradResponse, body)
        decoder = wire.Decoder(message.tensors, attachments, types=TYPES, resolve_ref=refs.append)
        decoder.keep_requires_grad()
        value = decoder.value(message.result)
        if isinstance(value, torch.Tensor):
            touch(value.detach())
        if isinstance(value, numpy.ndarray) and value.size < 1000:
            repr(value)
        wire.flatten([value])
        return value
