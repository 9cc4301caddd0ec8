"""Codecs: what arrives, how far it is off, and that no message makes a decoder do harm."""

from __future__ import annotations

import math
import tracemalloc

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.wire.support import assert_same_bits, bits

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import tensor_pb2
from gradwire.wire import CODECS, COMPRESS_FROM, Decoder, Encoder, find_codec

LOSSY = ["fp16", "bf16", "int8"]
REAL = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
EXACT_TYPES = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]


class KeptResult:
    """What is owed to one place."""

    def __init__(self) -> None:
        self.owed: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        owed, self.owed = self.owed, None
        return owed

    def put(self, left_out: torch.Tensor) -> None:
        self.owed = left_out


def send(*tensors: torch.Tensor, codec: str | None = None, attach_from: int | None = None, residual=None):
    """The decoder that took them, and the table that travelled."""
    encoder = Encoder(attach_from=attach_from, codec=find_codec(CODECS[codec], residual) if codec else None)
    for tensor in tensors:
        encoder.tensor(tensor)
    table, attachments = encoder.finish()
    parsed = tensor_pb2.TensorTable.FromString(table.SerializeToString())
    decoder = Decoder(parsed, [numpy.array(attachment.view) for attachment in attachments])
    assert decoder.saved == encoder.saved
    return decoder, parsed


def is_encoded(table: tensor_pb2.TensorTable, storage: int = 0) -> bool:
    return table.storages[storage].WhichOneof("content") == "encoded"


def bound(codec: str, sent: torch.Tensor) -> torch.Tensor | float:
    """The largest error that rounding may make, an element at a time."""
    largest = sent.abs().double()
    rounding = torch.finfo(sent.dtype).eps if sent.dtype in REAL else 0
    if codec == "int8":
        # Half a step of a block is at most half a step of the whole.
        return float(largest.max()) * (0.5 / 127 + rounding) * 1.001 + 1e-42
    target = torch.finfo(torch.float16 if codec == "fp16" else torch.bfloat16)
    return largest * target.eps / 2 * 1.001 + target.smallest_normal * target.eps


@pytest.mark.parametrize("attach_from", [None, 0], ids=["inline", "attached"])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("codec", LOSSY)
@given(
    count=st.integers(1, 5000),
    exponent=st.integers(-4, 4),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=20, deadline=None)
def test_a_lossy_codec_is_off_by_no_more_than_its_rounding(codec, dtype, attach_from, count, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    sent = (torch.randn(count, generator=generator, dtype=torch.float64) * 10.0**exponent).to(dtype)
    decoder, table = send(sent, codec=codec, attach_from=attach_from)
    arrived = decoder.tensors[0]
    is_large = sent.nbytes >= COMPRESS_FROM
    helps = codec == "int8" or dtype in (torch.float32, torch.float64)
    assert is_encoded(table) == (is_large and helps)
    assert arrived.dtype == dtype
    if is_encoded(table):
        assert ((arrived.double() - sent.double()).abs() <= bound(codec, sent)).all()
        assert decoder.saved > 0.4 * sent.nbytes
    else:
        assert_same_bits(arrived, sent)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_numbers_are_pairs(codec, dtype):
    sent = torch.randn(40, 70, dtype=dtype)
    decoder, table = send(sent, codec=codec)
    assert is_encoded(table)
    off = torch.view_as_real(decoder.tensors[0] - sent).abs()
    assert off.max() <= torch.view_as_real(sent).abs().max() / 100


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", EXACT_TYPES)
def test_what_is_not_floating_point_is_never_rounded(codec, dtype):
    sent = torch.randint(0, 100, (10_000,)).to(dtype)
    decoder, table = send(sent, codec=codec)
    assert not is_encoded(table)
    assert_same_bits(decoder.tensors[0], sent)


@pytest.mark.parametrize("attach_from", [None, 0], ids=["inline", "attached"])
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX, *EXACT_TYPES])
@given(kinds=st.integers(1, 50), count=st.integers(1, 9000), seed=st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_zstd_loses_nothing(dtype, attach_from, kinds, count, seed):
    generator = torch.Generator().manual_seed(seed)
    sent = torch.randint(0, kinds, (count,), generator=generator).to(dtype)
    decoder, table = send(sent, codec="zstd", attach_from=attach_from)
    assert is_encoded(table) == (sent.nbytes >= COMPRESS_FROM)
    assert_same_bits(decoder.tensors[0], sent)


def test_zstd_keeps_the_bits_of_nan():
    sent = torch.zeros(5000, dtype=torch.int32)
    sent[::7] = 0x7F800001  # a signalling NaN with a payload
    decoder, table = send(sent.view(torch.float32), codec="zstd")
    assert is_encoded(table)
    assert bits(decoder.tensors[0]) == bits(sent)


def test_what_zstd_cannot_shrink_goes_as_it_is():
    sent = torch.randint(0, 256, (100_000,), dtype=torch.uint8)
    decoder, table = send(sent, codec="zstd")
    assert not is_encoded(table)
    assert_same_bits(decoder.tensors[0], sent)


def test_zeros_are_padded_to_the_growth_that_receivers_allow():
    decoder, table = send(torch.zeros(1 << 20), codec="zstd", attach_from=0)
    assert is_encoded(table)
    assert decoder.saved == (4 << 20) * 15 // 16
    assert not decoder.tensors[0].any()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_arrive_as_they_are(codec, odd):
    sent = torch.randn(4096)
    sent[17] = odd
    decoder, table = send(sent, codec=codec)
    arrived = decoder.tensors[0]
    assert torch.equal(arrived.isfinite(), sent.isfinite())
    assert torch.equal(arrived[17:18].isnan(), sent[17:18].isnan())
    assert arrived[17] == sent[17] or odd is math.nan
    if codec == "int8":
        assert not is_encoded(table)
        assert_same_bits(arrived, sent)


@pytest.mark.parametrize(
    ("codec", "dtype", "beyond"),
    [
        ("fp16", torch.float32, 65520.0),
        ("fp16", torch.float64, -1e30),
        ("bf16", torch.float64, 1e39),
        ("bf16", torch.float32, 3.4e38),
        ("int8", torch.float64, 1e300),
    ],
)
def test_a_number_beyond_the_range_of_a_codec_makes_it_step_aside(codec, dtype, beyond):
    sent = torch.randn(4096, dtype=dtype)
    sent[3] = beyond
    decoder, table = send(sent, codec=codec)
    assert not is_encoded(table)
    assert_same_bits(decoder.tensors[0], sent)


def test_a_block_is_not_hurt_by_its_neighbours():
    sent = torch.full((2048,), 1e-6)
    sent[:256] = 1e6
    arrived = send(sent, codec="int8")[0].tensors[0]
    assert torch.allclose(arrived, sent, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-45, 130e-45, 1e-300])
def test_int8_of_nothing_and_of_denormal_numbers(value):
    sent = torch.full((4096,), value, dtype=torch.float64)
    arrived = send(sent, codec="int8")[0].tensors[0]
    assert (arrived - sent).abs().max() <= 1e-44


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[3:],
        lambda x: x.permute(1, 0)[5:, 2:],
        lambda x: x[:, :1].expand(200, 100),
        lambda x: x.neg() * 1,
    ],
)
def test_views_keep_their_shape_and_nearly_their_values(codec, view):
    sent = view(torch.randn(200, 100))
    arrived = send(sent, codec=codec)[0].tensors[0]
    assert arrived.shape == sent.shape
    assert torch.allclose(arrived, sent, atol=0.05)


@pytest.mark.parametrize("codec", LOSSY)
def test_tensors_that_share_memory_share_it_still_and_are_exact(codec):
    x = torch.randn(100, 100)
    decoder, table = send(x, x[10:], x.view(torch.int32), codec=codec)
    whole, part, integers = decoder.tensors
    assert len(table.storages) == 1
    assert not is_encoded(table)
    assert_same_bits(whole, x)
    part.zero_()
    assert not whole[10:].any()
    assert not integers[10:].any()


def test_zstd_of_shared_memory_is_shared():
    x = torch.randint(0, 3, (100, 100))
    decoder, table = send(x, x[10:], codec="zstd")
    assert is_encoded(table)
    whole, part = decoder.tensors
    assert torch.equal(whole, x)
    part.zero_()
    assert not whole[10:].any()


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_tensor_twice_is_one(codec):
    x = torch.randn(100, 100)
    encoder = Encoder(codec=find_codec(CODECS[codec]))
    value = encoder.value([x, x], "x")
    decoder = Decoder(encoder.finish()[0])
    one, other = decoder.value(value)
    assert one is other


@pytest.mark.parametrize("codec", LOSSY)
def test_sparse_tensors_are_left_alone(codec):
    sent = torch.randn(100, 100).relu().to_sparse()
    decoder, table = send(sent, codec=codec)
    assert not any(is_encoded(table, index) for index in range(len(table.storages)))
    assert torch.equal(decoder.tensors[0].to_dense(), sent.to_dense())


@pytest.mark.parametrize("codec", CODECS)
def test_what_arrives_is_memory_of_its_own(codec):
    sent = torch.randint(0, 9, (3000,)).float()
    arrived = send(sent, codec=codec, attach_from=0)[0].tensors[0]
    before = sent.clone()
    arrived.zero_()
    arrived.resize_(10_000)
    assert torch.equal(sent, before)


# -- error feedback


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("count", [4096, 300_001])
def test_what_is_left_out_is_what_arrives_less(dtype, count):
    kept = KeptResult()
    sent = torch.randn(count).to(dtype)
    arrived = send(sent, codec="int8", residual=kept)[0].tensors[0]
    assert kept.owed is not None
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert torch.equal(kept.owed, sent.to(wide) - arrived.to(wide))


def test_with_feedback_the_sum_of_what_arrives_keeps_up_with_the_sum_of_what_was_sent():
    generator = torch.Generator().manual_seed(0)
    constant = torch.randn(5000, generator=generator)
    kept = KeptResult()
    with_feedback, without = torch.zeros(5000), torch.zeros(5000)
    for _ in range(50):
        with_feedback += send(constant, codec="int8", residual=kept)[0].tensors[0]
        without += send(constant, codec="int8")[0].tensors[0]
    step = float(constant.abs().max()) / 127
    # One rounding is owed at any time, however many were made; without, each makes the same error again.
    assert (with_feedback - 50 * constant).abs().max() <= 0.6 * step
    assert (without - 50 * constant).abs().max() > 10 * step


def test_a_gradient_that_is_not_finite_leaves_what_is_owed():
    kept = KeptResult()
    send(torch.randn(4096), codec="int8", residual=kept)
    owed = kept.owed
    send(torch.full((4096,), math.nan), codec="int8", residual=kept)
    assert kept.owed is owed


# -- hostile messages

FLOAT32, FLOAT16 = tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_FLOAT16
Encoded = tensor_pb2.Encoded


def encoded_table(size: int, content: bytes, **codec: object) -> tensor_pb2.TensorTable:
    encoded = Encoded(inline=content, **codec)  # type: ignore[arg-type]
    tensor = tensor_pb2.Tensor(dtype=FLOAT32, shape=[size // 4])
    return tensor_pb2.TensorTable(tensors=[tensor], storages=[tensor_pb2.Storage(size=size, encoded=encoded)])


def narrowed(dtype=FLOAT32, narrow=FLOAT16) -> dict[str, object]:
    return {"narrowed": Encoded.Narrowed(dtype=dtype, narrow=narrow)}


def blockwise(dtype=FLOAT32, block=256) -> dict[str, object]:
    return {"blockwise": Encoded.Blockwise(dtype=dtype, block=block)}


def zstandard(width=4) -> dict[str, object]:
    return {"zstandard": Encoded.Zstandard(width=width)}


def frame(content: bytes, **options: object) -> bytes:
    import zstandard as module

    return module.ZstdCompressor(**options).compress(content)


HOSTILE = {
    "no codec": encoded_table(16, bytes(8)),
    "nothing at all": encoded_table(0, b"", **narrowed()),
    "a narrowed one that is too short": encoded_table(16, bytes(7), **narrowed()),
    "a narrowed one that is too long": encoded_table(16, bytes(9), **narrowed()),
    "half an element": encoded_table(18, bytes(9), **narrowed()),
    "narrowed integers": encoded_table(16, bytes(8), **narrowed(dtype=tensor_pb2.DTYPE_INT32)),
    "narrowed from an unknown dtype": encoded_table(16, bytes(8), **narrowed(dtype=99)),
    "narrowed to an unknown dtype": encoded_table(16, bytes(8), **narrowed(narrow=99)),
    "narrowed to no dtype": encoded_table(16, bytes(8), **narrowed(narrow=0)),
    "narrowed to integers": encoded_table(16, bytes(8), **narrowed(narrow=tensor_pb2.DTYPE_INT16)),
    "narrowed to quantized": encoded_table(16, bytes(4), **narrowed(narrow=tensor_pb2.DTYPE_QINT8)),
    "blocks without elements": encoded_table(16, bytes(8), **blockwise(block=0)),
    "blocks that are too large": encoded_table(16, bytes(8), **blockwise(block=2**31)),
    "a scale too few": encoded_table(16, bytes(4), **blockwise()),
    "a scale too many": encoded_table(16, bytes(12), **blockwise()),
    "blocks of integers": encoded_table(16, bytes(8), **blockwise(dtype=tensor_pb2.DTYPE_INT32)),
    "blocks of complex numbers": encoded_table(16, bytes(6), **blockwise(dtype=tensor_pb2.DTYPE_COMPLEX64)),
    "blocks of an unknown dtype": encoded_table(16, bytes(8), **blockwise(dtype=77)),
    "no frame": encoded_table(16, bytes(16), **zstandard()),
    "an empty frame": encoded_table(16, frame(b"") + bytes(16), **zstandard()),
    "a frame that is cut off": encoded_table(4000, frame(bytes(range(250)) * 16)[:-9], **zstandard()),
    "a frame of more than was said": encoded_table(4000, frame(bytes(4004)) + bytes(999), **zstandard()),
    "a frame of less than was said": encoded_table(4004, frame(bytes(4000)) + bytes(999), **zstandard()),
    "a frame without its size": encoded_table(
        4000, frame(bytes(4000), write_content_size=False) + bytes(999), **zstandard()
    ),
    "groups that do not come out even": encoded_table(4000, frame(bytes(4000)) + bytes(999), **zstandard(3)),
    "groups wider than all": encoded_table(4000, frame(bytes(4000)) + bytes(999), **zstandard(2**31)),
    "more growth than is allowed": encoded_table(1 << 20, frame(bytes(1 << 20)), **zstandard()),
    "a size that overflows": encoded_table(2**64 - 4, bytes(8), **zstandard()),
}


@pytest.mark.parametrize("table", HOSTILE.values(), ids=HOSTILE)
def test_an_encoded_storage_is_refused_with(table):
    with pytest.raises(MalformedMessage):
        Decoder(table)


def test_a_valid_one_of_each_is_taken():
    for table in (
        encoded_table(16, bytes(8), **narrowed()),
        encoded_table(16, bytes(8), **blockwise()),
        encoded_table(4000, frame(bytes(4000)) + bytes(999), **zstandard()),
        encoded_table(4000, frame(bytes(4000)) + bytes(999), **zstandard(0)),
    ):
        assert not Decoder(table).tensors[0].any()


def test_a_bomb_allocates_nothing():
    bomb = frame(bytes(256 << 20))
    size = 256 << 20
    tracemalloc.start()
    with pytest.raises(MalformedMessage, match="16 times"):
        Decoder(encoded_table(size, bomb, **zstandard()))
    # A header that promises more than the storage says.
    with pytest.raises(MalformedMessage, match="does not decode to"):
        Decoder(encoded_table(16 * len(bomb), bomb, **zstandard()))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_encoded_attachments_must_be_there_once():
    encoded = Encoded(attachment=0, **narrowed())
    storage = tensor_pb2.Storage(size=16, encoded=encoded)
    eight = numpy.zeros(8, dtype=numpy.uint8)
    Decoder(tensor_pb2.TensorTable(storages=[storage]), [eight])
    with pytest.raises(MalformedMessage, match="0 were received"):
        Decoder(tensor_pb2.TensorTable(storages=[storage]))
    with pytest.raises(MalformedMessage, match="two storages"):
        Decoder(tensor_pb2.TensorTable(storages=[storage, storage]), [eight])


@given(
    message=st.binary(max_size=64),
    size=st.integers(0, 2**64 - 1) | st.integers(0, 200),
    codec=st.sampled_from([narrowed(), blockwise(), zstandard(), narrowed(1, 1), blockwise(5, 3)]),
)
@settings(max_examples=200, deadline=None)
def test_no_bytes_do_harm(message, size, codec):
    try:
        decoder = Decoder(encoded_table(size, message, **codec))
    except MalformedMessage:
        return
    assert decoder.tensors[0].nbytes <= size
