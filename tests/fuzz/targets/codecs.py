"""Compressed memory: a TensorTable whose storages went through codecs."""

from __future__ import annotations

import torch
from tests.fuzz.inputs import Input
from tests.fuzz.target import Target

from gradwire import wire
from gradwire.errors import ResourceExhausted, WireError
from gradwire.proto.v1 import tensor_pb2

__all__ = ["Codecs"]


class Codecs(Target):
    name = "codecs"
    refuses = (WireError, ResourceExhausted)
    kinds = (tensor_pb2.TensorTable,)

    def corpus(self) -> dict[str, Input]:
        numbers = torch.arange(1100, dtype=torch.float32) / 7
        inputs = {}
        for codec, number in wire.CODECS.items():
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
                encoder = wire.Encoder(attach_from=None, codec=wire.find_codec(number))
                encoder.value([numbers.to(dtype)], "tensors")
                table, _ = encoder.finish()
                if any(storage.HasField("encoded") for storage in table.storages):
                    name = str(dtype).removeprefix("torch.")
                    inputs[f"{codec}-{name}"] = (table.SerializeToString(),)
        return inputs

    def run(self, parts: Input) -> object:
        table = wire.parse(tensor_pb2.TensorTable, parts[0])
        return wire.Decoder(table, limits=wire.Limits(max_tensor_elements=1 << 20)).tensors
