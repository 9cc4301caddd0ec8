"""Gradients, in full and in short, for tensors that this peer sent."""

from __future__ import annotations

import numpy
import torch
from tests.fuzz.inputs import Input
from tests.fuzz.target import Target
from tests.fuzz.targets.samples import touch

from gradwire import wire
from gradwire.autograd.gradients import (
    TensorMetadata,
    add_gradients,
    decode_gradients,
    encode_gradients,
    gradient_limits,
    nbytes,
)
from gradwire.autograd.responses import AWAITS_END, ShortResponse, read_short
from gradwire.autograd.short_gradients import (
    GradientsReader,
    GradientsWriter,
    ShortRequest,
    short_request,
)
from gradwire.errors import ResourceExhausted, WireError
from gradwire.proto.v1 import autograd_pb2
from gradwire.wire.ids import AutogradMessageId, ContextId

__all__ = ["FullGradients", "ShortGradients"]

_SENT = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.complex64), torch.zeros(0, 5), torch.zeros(16_400)]
EXPECTED = [TensorMetadata.of(tensor) for tensor in _SENT]
_ID = AutogradMessageId(5, 1, 8)
_GRADIENTS: dict[str, list[torch.Tensor | None]] = {
    "all": [torch.ones(2, 3), torch.ones(4, dtype=torch.complex64), None, torch.ones(16_400)],
    "some": [None, torch.ones(4, dtype=torch.complex64), None, None],
    "repeated": [torch.ones(()).expand(2, 3), None, None, torch.ones(()).expand(16_400)],
}


class FullGradients(Target):
    name = "gradients"
    refuses = (WireError, ResourceExhausted)
    kinds = (autograd_pb2.PropagateGradientsResponse, None)
    most_parts = 4

    def corpus(self) -> dict[str, Input]:
        inputs = {}
        sparse: list[torch.Tensor | None] = [torch.eye(2, 3).to_sparse_coo(), None, None, None]
        for name, gradients in {**_GRADIENTS, "sparse": sparse}.items():
            response = autograd_pb2.PropagateGradientsResponse()
            encoder = wire.Encoder()
            for _ in range(2):
                encode_gradients(response.contributions.add(), _ID, gradients, encoder)
            table, attachments = encoder.finish()
            response.tensors.CopyFrom(table)
            inputs[name] = (response.SerializeToString(), *(bytes(sent.view) for sent in attachments))
        return inputs

    def run(self, parts: Input) -> object:
        body, *rest = parts
        response = wire.parse(autograd_pb2.PropagateGradientsResponse, body)
        attachments = [numpy.frombuffer(bytearray(part), numpy.uint8) for part in rest]
        limits = gradient_limits(wire.Limits(max_tensor_elements=1 << 20), EXPECTED)
        decoder = wire.Decoder(response.tensors, attachments, limits=limits)
        total: list[torch.Tensor | None] = [None] * len(EXPECTED)
        for contribution in response.contributions:
            gradients = decode_gradients(contribution, decoder, EXPECTED)
            for gradient in gradients:
                if gradient is not None:
                    nbytes(gradient)
                    touch(gradient)
            try:
                add_gradients(total, gradients)
            except (RuntimeError, NotImplementedError):
                pass  # torch adds no such dtypes or layouts
        return total


class ShortGradients(Target):
    """The first part is a request in short, the second a response in short; then come attachments."""

    name = "short-gradients"
    most_parts = 4

    def corpus(self) -> dict[str, Input]:
        inputs = {}
        for name, gradients in _GRADIENTS.items():
            writer = GradientsWriter()
            assert writer.add(_ID, gradients, EXPECTED)
            request, attachments = short_request(
                AutogradMessageId(5, 2, 8),
                ContextId(5, 3, 8),
                writer,
                [_ID],
                retain_graph=True,
                skip_leaves=False,
                collect=True,
            )
            content, _ = writer.of_all()
            response = ShortResponse(1, 1, None, content, ()).body([_ID])
            inputs[name] = (request, response, *(bytes(sent.view) for sent in attachments))
        return inputs

    def run(self, parts: Input) -> object:
        request, response = (*parts, b"")[:2]
        attachments = [memoryview(bytearray(part)) for part in parts[2:]]
        try:
            return ShortRequest(request).gradients(EXPECTED, attachments)
        finally:
            _, count, _, _, at = read_short(response, AWAITS_END)
            reader = GradientsReader(response, at)
            for _ in range(count):
                reader.read_message()
                reader.expect(EXPECTED)
            reader.read(attachments)
