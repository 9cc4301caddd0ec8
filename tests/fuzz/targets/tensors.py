"""Tensors and their storages: a TensorTable, then attachments."""

from __future__ import annotations

import numpy
from tests.fuzz.inputs import Input
from tests.fuzz.target import Target
from tests.fuzz.targets import samples
from tests.fuzz.targets.samples import touch

from gradwire import wire
from gradwire.errors import ResourceExhausted, WireError
from gradwire.proto.v1 import tensor_pb2

__all__ = ["Tensors"]


class Tensors(Target):
    name = "tensors"
    refuses = (WireError, ResourceExhausted)
    kinds = (tensor_pb2.TensorTable, None)
    most_parts = 8
    words = ("cpu", "cpu:1", "meta", "cuda:0", "lazy")

    def corpus(self) -> dict[str, Input]:
        return {
            f"{name}-{how}": self._encoded(tensors, attach_from)
            for name, tensors in samples.tensors().items()
            for how, attach_from in (("inline", None), ("attached", 0))
            if name != "large" or attach_from is None
        }

    @staticmethod
    def _encoded(tensors: object, attach_from: int | None) -> Input:
        encoder = wire.Encoder(attach_from=attach_from)
        encoder.value(tensors, "tensors")
        table, attachments = encoder.finish()
        return (table.SerializeToString(), *(bytes(attachment.view) for attachment in attachments))

    def run(self, parts: Input) -> object:
        body, *rest = parts
        table = wire.parse(tensor_pb2.TensorTable, body)
        attachments = [numpy.frombuffer(bytearray(part), numpy.uint8) for part in rest]
        decoder = wire.Decoder(table, attachments, limits=wire.Limits(max_tensor_elements=1 << 20))
        for tensor in decoder.tensors:
            touch(tensor)
        decoder.keep_requires_grad()
        return decoder.tensors
