"""Sending values through real bytes, and comparing what arrives bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from hypothesis import strategies as st

from gradwire.proto.v1 import tensor_pb2, value_pb2
from gradwire.wire import Decoder, Encoder, Flat, Limits, TypeRegistry, flatten
from gradwire.wire.memory import as_carrier

torch.set_num_threads(1)

MODES = {"inline": None, "attached": 0}


def encode(
    obj: object, attach_from: int | None = None, types: TypeRegistry | None = None
) -> tuple[bytes, bytes, list[numpy.ndarray]]:
    encoder = Encoder(attach_from=attach_from, types=types)
    value = encoder.value(obj, "obj")
    table, attachments = encoder.finish()
    return (
        value.SerializeToString(),
        table.SerializeToString(),
        [numpy.array(attachment.view) for attachment in attachments],
    )


def decode(value: bytes, table: bytes, attachments=(), **options) -> object:
    decoder = Decoder(tensor_pb2.TensorTable.FromString(table), attachments, **options)
    return decoder.value(value_pb2.Value.FromString(value))


def round_trip(obj: object, attach_from: int | None = None, types: TypeRegistry | None = None) -> object:
    return decode(*encode(obj, attach_from, types), types=types, limits=Limits())


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, as they lie in memory."""
    return as_carrier(tensor.detach()).contiguous().numpy().tobytes()


def assert_same_bits(arrived: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(arrived) is torch.Tensor
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.layout == sent.layout
    assert bits(arrived) == bits(sent)


def taken_apart(values: Sequence[object]) -> Flat:
    flat = flatten(values)
    assert flat is not None
    return flat


Changes = Sequence[tuple[int, str, bytes]]
changes_of_bytes: st.SearchStrategy[Changes] = st.lists(
    st.tuples(
        st.integers(0, 400), st.sampled_from(["set", "insert", "delete", "cut"]), st.binary(max_size=9)
    ),
    min_size=1,
    max_size=4,
)


def changed(body: bytes, changes: Changes) -> bytes:
    """A body in which some bytes are others, or are missing, or too many."""
    for at, how, content in changes:
        at %= len(body) + 1
        if how == "set":
            body = body[:at] + content + body[at + len(content) :]
        elif how == "insert":
            body = body[:at] + content + body[at:]
        elif how == "delete":
            body = body[:at] + body[at + len(content) :]
        else:
            body = body[:at]
    return body
