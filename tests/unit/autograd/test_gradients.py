"""Gradients that came are for the tensors that they name, or refused."""

from __future__ import annotations

import pytest
import torch

from gradwire import wire
from gradwire.autograd.gradients import TensorMetadata, decode_gradients
from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import autograd_pb2

LIKE = [TensorMetadata.of(torch.empty(3)), TensorMetadata.of(torch.empty(2, dtype=torch.complex64))]


def decoded(gradient: torch.Tensor, slot: int, tensors: list[int] | None = None) -> list[torch.Tensor | None]:
    encoder = wire.Encoder()
    index = encoder.tensor(gradient)
    message = autograd_pb2.Gradients(slots=[slot], tensors=[index] if tensors is None else tensors)
    return decode_gradients(message, wire.Decoder(encoder.finish()[0]), LIKE)


def test_one_that_fits() -> None:
    first, second = decoded(torch.ones(2, dtype=torch.complex64), 1)
    assert first is None
    assert second is not None
    assert second.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("gradient", "slot"),
    [
        pytest.param(torch.ones(4), 0, id="shape"),
        pytest.param(torch.ones(3, dtype=torch.complex64), 0, id="complex for real"),
        pytest.param(torch.ones(2), 1, id="real for complex"),
        pytest.param(torch.ones(3), 2, id="slot"),
    ],
)
def test_one_that_does_not_fit(gradient: torch.Tensor, slot: int) -> None:
    with pytest.raises(MalformedMessage):
        decoded(gradient, slot)


@pytest.mark.parametrize("tensors", [[], [1], [0, 0]])
def test_tensors_that_are_not_there(tensors: list[int]) -> None:
    with pytest.raises(MalformedMessage):
        decoded(torch.ones(3), 0, tensors)
