"""The gradients of one message: adding them up, and their form on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch

from gradwire import wire
from gradwire.autograd.feedback import GradientCodecs
from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import autograd_pb2
from gradwire.torch_internals import coo_values
from gradwire.wire.ids import AutogradMessageId

__all__ = [
    "Gradients",
    "TensorMetadata",
    "add_gradients",
    "added",
    "decode_gradients",
    "elements_of",
    "encode_gradients",
    "gradient_limits",
    "nbytes",
]

Gradients = Sequence[torch.Tensor | None]
"""A gradient, or none, for each tensor of a message that requires grad."""


class TensorMetadata(NamedTuple):
    """What the gradient of a tensor that was sent must look like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tensor.shape, tensor.dtype, tensor.device)


def added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients. Never in place, because gradients may share memory."""
    # torch adds a sparse tensor to a dense one, but not the other way round.
    return other + one if one.layout is not torch.strided else one + other


def add_gradients(total: list[torch.Tensor | None], more: Gradients) -> None:
    """Adds to a running sum."""
    for slot, gradient in enumerate(more):
        if gradient is not None:
            so_far = total[slot]
            total[slot] = gradient if so_far is None else added(so_far, gradient)


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor; of a sparse tensor, those that it has."""
    if tensor.layout is torch.strided:
        return tensor
    return coo_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()


def nbytes(tensor: torch.Tensor) -> int:
    """The memory of a tensor's elements."""
    return elements_of(tensor).nbytes


def encode_gradients(
    message: autograd_pb2.Gradients,
    id: AutogradMessageId,
    gradients: Gradients,
    encoder: wire.Encoder,
    codecs: GradientCodecs | None = None,
    position: int = 0,
) -> None:
    """Writes the gradients of one message, the `position`-th in its request or response."""
    id.write(message.message)
    for slot, gradient in enumerate(gradients):
        if gradient is not None:
            message.slots.append(slot)
            codec = None if codecs is None else codecs.find(gradient, slot, position)
            message.tensors.append(encoder.tensor(gradient, f"gradient {slot}", codec))


def gradient_limits(limits: wire.Limits, sent: Iterable[TensorMetadata]) -> wire.Limits:
    """The limits on gradients for tensors that this peer sent.

    Gradients have the shapes of those tensors and are often expanded, as that of a sum is. A size that was
    allowed for a tensor is allowed for its gradient.
    """
    largest = max((tensor.shape.numel() for tensor in sent), default=0)
    return replace(limits, max_tensor_elements=max(limits.max_tensor_elements, largest))


def decode_gradients(
    message: autograd_pb2.Gradients, decoder: wire.Decoder, expected: Sequence[TensorMetadata]
) -> list[torch.Tensor | None]:
    """The gradients for the tensors of a message, on the devices of those tensors."""
    gradients: list[torch.Tensor | None] = [None] * len(expected)
    if len(message.slots) != len(message.tensors):
        raise MalformedMessage(f"{len(message.slots)} slots but {len(message.tensors)} gradients")
    for slot, index in zip(message.slots, message.tensors, strict=True):
        if slot >= len(expected) or index >= len(decoder.tensors):
            raise MalformedMessage(
                f"slot {slot} with tensor {index} does not exist: there are {len(expected)}"
            )
        gradient = decoder.tensors[index]
        shape, dtype, device = expected[slot]
        if gradient.shape != shape or gradient.is_complex() != dtype.is_complex:
            kind = "complex" if dtype.is_complex else "real"
            raise MalformedMessage(
                f"a gradient of shape {tuple(gradient.shape)} and {gradient.dtype} for a {kind} tensor of "
                f"shape {tuple(shape)}"
            )
        gradients[slot] = gradient.to(device)
    return gradients
