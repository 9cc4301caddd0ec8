"""What goes in as a tensor comes out as the same tensor, bit for bit."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.wire.support import MODES, assert_same_bits, bits, encode, round_trip

from gradwire.errors import Unencodable
from gradwire.wire import Encoder
from gradwire.wire.dtypes import BY_NUMBER, QUANTIZED
from gradwire.wire.memory import build, contiguous_strides, is_dense

PLAIN_DTYPES = sorted(
    (wire_type.dtype for wire_type in BY_NUMBER.values() if wire_type.dtype not in QUANTIZED), key=str
)
relaxed = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
modes = st.sampled_from(list(MODES.values()))


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype] = PLAIN_DTYPES) -> torch.Tensor:
    """Tensors of any dtype over random bits, seen through slices, transposes and expands."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(numpy.prod(shape, dtype=int))
    seed = draw(st.integers(0, 2**32 - 1))
    content = numpy.random.default_rng(seed).integers(0, 256, (count + 1) * 16, dtype=numpy.uint8)
    if dtype is torch.bool:
        content &= 1
    tensor = build(
        dtype, torch.from_numpy(content), draw(st.integers(0, 1)), shape, contiguous_strides(shape)
    )
    for step in draw(st.lists(st.sampled_from(["slice", "transpose", "expand", "step"]), max_size=3)):
        if step == "expand":
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
        if tensor.dim() == 0:
            continue
        dim = draw(st.integers(0, tensor.dim() - 1))
        if step == "transpose":
            tensor = tensor.transpose(0, dim)
        elif step == "slice":
            start = draw(st.integers(0, tensor.shape[dim]))
            tensor = tensor.narrow(dim, start, draw(st.integers(0, tensor.shape[dim] - start)))
        elif step == "step":
            index = [slice(None)] * tensor.dim()
            index[dim] = slice(None, None, draw(st.integers(1, 3)))
            tensor = tensor[tuple(index)]
    return tensor


@relaxed
@given(tensors(), modes)
def test_any_view_of_any_dtype_arrives_bit_for_bit(tensor, mode):
    assert_same_bits(round_trip(tensor, mode), tensor)


@relaxed
@given(tensors(), modes)
def test_strides_are_kept_where_a_view_has_no_gaps(tensor, mode):
    arrived = round_trip(tensor, mode)
    if is_dense(tensor.shape, tensor.stride()):
        assert arrived.stride() == tensor.stride()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_arrives_contiguous_strided_empty_and_as_a_scalar(dtype, mode):
    content = torch.arange(256, dtype=torch.uint8) & (1 if dtype is torch.bool else 255)
    for offset, shape, strides in [
        (0, (3, 4), (4, 1)),
        (1, (3, 2), (4, 2)),
        (2, (4, 3), (1, 4)),
        (3, (), ()),
        (0, (0, 3), (3, 1)),
        (1, (2, 3), (0, 1)),
    ]:
        tensor = build(dtype, content, offset, shape, strides)
        assert_same_bits(round_trip([tensor, 1], mode)[0], tensor)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_nan_payloads_survive_signalling_ones_too(mode):
    patterns = torch.tensor([0x7F800001, 0x7FC12345, -0x7FFFFF, 0x7FFFFFFF], dtype=torch.int32)
    for view in (patterns.view(torch.float32), patterns.view(torch.float32)[::2]):
        assert_same_bits(round_trip(view, mode), view)


def test_a_size_one_dimension_keeps_its_odd_stride():
    tensor = torch.empty(6).as_strided((2, 1, 3), (3, 77, 1))
    assert round_trip(tensor).stride() == (3, 77, 1)
    channels_last = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert round_trip(channels_last).is_contiguous(memory_format=torch.channels_last)


def test_an_expanded_view_costs_the_bytes_of_what_it_repeats():
    tensor = torch.randn(4, 6)[:, ::2].unsqueeze(0).expand(1000, 4, 3)
    _, table, _ = encode(tensor)
    assert len(table) < 200
    assert_same_bits(round_trip(tensor), tensor)
    assert round_trip(tensor).stride()[0] == 0


def test_overlapping_windows_stay_overlapping():
    windows = torch.arange(20.0)[::2].unfold(0, 4, 1)
    arrived = round_trip(windows)
    assert_same_bits(arrived, windows)
    assert arrived.stride() == windows.stride()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conj_and_neg_views_arrive_resolved(dtype):
    part = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}[
        dtype
    ]
    parts = torch.tensor([[1.0, 2.0], [float("nan"), -0.0], [3.0, float("inf")]], dtype=part)
    tensor = torch.view_as_complex(parts) if dtype is not torch.complex32 else parts.view(dtype).squeeze(1)
    expected = parts.clone()
    expected.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[part.itemsize])[:, 1] ^= torch.iinfo(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[part.itemsize]
    ).min
    arrived = round_trip(tensor.conj())
    assert not arrived.is_conj()
    assert bits(arrived) == bits(expected)
    negative = tensor.conj().imag
    assert negative.is_neg()
    assert bits(round_trip(negative)) == bits(expected[:, 1])


def test_a_zero_tensor_arrives_as_zeros():
    assert_same_bits(round_trip(torch._efficientzerotensor((3,))), torch.zeros(3))


def test_meta_tensors_travel_without_bytes():
    tensor = torch.empty(1000, 2000, 3, device="meta").transpose(0, 1)
    arrived = round_trip(tensor)
    assert arrived.is_meta
    assert (arrived.shape, arrived.stride(), arrived.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    half = torch.empty(2, dtype=torch.int32, device="meta").view(torch.complex32)
    assert round_trip(half).dtype == torch.complex32


def test_a_parameter_arrives_as_a_plain_tensor_and_its_requires_grad_is_told_apart():
    from gradwire.proto.v1 import tensor_pb2
    from gradwire.wire import Decoder

    encoder = Encoder()
    encoder.value([torch.nn.Parameter(torch.ones(2)), torch.ones(2)], "args")
    table, _ = encoder.finish()
    decoder = Decoder(tensor_pb2.TensorTable.FromString(table.SerializeToString()))
    assert decoder.slots == [0]
    assert [type(tensor) for tensor in decoder.tensors] == [torch.Tensor, torch.Tensor]
    assert not any(tensor.requires_grad for tensor in decoder.tensors)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_quantized_tensors_arrive_with_their_scales(dtype):
    whole = torch.quantize_per_tensor(torch.linspace(-1, 1, 12).view(3, 4), 0.05, 3, dtype)
    for sent in (whole, whole.t(), whole[:, ::2]):
        arrived = round_trip(sent)
        assert_same_bits(arrived, sent)
        assert (arrived.q_scale(), arrived.q_zero_point()) == (0.05, 3)
        assert torch.equal(arrived.dequantize(), sent.dequantize())
    scales, zeros = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    channels = torch.quantize_per_channel(torch.linspace(-1, 1, 12).view(3, 4), scales, zeros, 1, dtype)
    arrived = round_trip(channels)
    assert_same_bits(arrived, channels)
    assert torch.equal(arrived.dequantize(), channels.dequantize())
    assert arrived.q_per_channel_axis() == 1


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: type("Mine", (torch.Tensor,), {})([1.0]), "type Mine"),
        (lambda: torch.ones(3).to_mkldnn(), "layout torch._mkldnn"),
        (lambda: torch._nested_tensor_from_tensor_list([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.empty(0, dtype=torch.quint4x2), "quint4x2"),
    ],
)
def test_what_cannot_travel_is_refused_with_its_path(make, reason):
    try:
        tensor = make()
    except (RuntimeError, AttributeError) as error:
        pytest.skip(f"this torch cannot make one: {error}")
    with pytest.raises(Unencodable, match=rf'args\[1\]\["mask"\].*{reason}'):
        Encoder().value([0, {"mask": tensor}], "args")
    with pytest.raises(TypeError, match="mask: "):
        Encoder().tensor(tensor, "mask")


def test_a_storage_that_was_resized_is_refused_rather_than_read_past_its_end():
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(8)
    with pytest.raises(Unencodable, match="resized"):
        Encoder().tensor(tensor)


def test_a_tensor_inside_vmap_is_refused():
    def send(row):
        Encoder().tensor(row, "row")
        return row

    with pytest.raises(Unencodable, match=r"row: .*torch\.func"):
        torch.vmap(send)(torch.ones(2, 3))


def test_a_surrounding_default_device_does_not_decide_where_bytes_go():
    tensor = torch.randn(6, 6)
    with torch.device("meta"):
        for mode in MODES.values():
            for sent in (tensor, tensor[::2, ::2], [tensor[::2], tensor[::3]], tensor.to_sparse()):
                arrived = round_trip(sent, mode)
                arrived = arrived[0] if isinstance(arrived, list) else arrived
                assert arrived.device.type == "cpu"


SPARSE = {
    "coo": lambda x: x.to_sparse(),
    "coo_uncoalesced": lambda x: torch.sparse_coo_tensor(
        torch.tensor([[1, 0, 1], [2, 1, 2]]), x[0, :3], x.shape, check_invariants=True
    ),
    "coo_hybrid": lambda x: x.to_sparse(1),
    "coo_expanded_indices": lambda x: torch.sparse_coo_tensor(
        torch.tensor([[1]]).expand(2, 3), x[0, :3], x.shape, check_invariants=True
    ),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 3)),
    "bsc": lambda x: x.to_sparse_bsc((2, 3)),
    "empty": lambda x: torch.zeros_like(x).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int64], ids=str)
@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_tensors_arrive_in_their_layout_with_the_same_components(make, dtype, mode):
    dense = torch.arange(24.0).view(4, 6).to(dtype)
    dense[1] = 0
    sent = make(dense)
    other, arrived, last = round_trip([dense, sent, 7], mode)
    assert last == 7
    assert_same_bits(other, dense)
    assert (arrived.layout, arrived.shape, arrived.dtype) == (sent.layout, sent.shape, sent.dtype)
    if sent.layout is torch.sparse_coo:
        assert arrived.is_coalesced() == sent.is_coalesced()
        assert (arrived.sparse_dim(), arrived.dense_dim()) == (sent.sparse_dim(), sent.dense_dim())
        names = ["_indices", "_values"]
    else:
        rows = sent.layout in (torch.sparse_csr, torch.sparse_bsr)
        names = ["crow_indices", "col_indices"] if rows else ["ccol_indices", "row_indices"]
        names.append("values")
    for name in names:
        assert_same_bits(getattr(arrived, name)(), getattr(sent, name)())


def test_user_tensors_have_the_same_index_in_the_table_though_sparse_ones_come_between():
    encoder = Encoder()
    first, sparse, last = torch.ones(1), torch.eye(2).to_sparse(), torch.ones(3)
    assert [encoder.tensor(tensor) for tensor in (first, sparse, last, first)] == [0, 1, 2, 0]
    table, _ = encoder.finish()
    assert [list(message.shape) for message in table.tensors[:3]] == [[1], [2, 2], [3]]
    assert list(table.tensors[1].components) == [3, 4]


FRESH_PROCESS = """
import torch
from gradwire.proto.v1 import tensor_pb2
from gradwire.wire import Decoder

def storage(content):
    return tensor_pb2.Storage(size=len(content), inline=content)

def indices(*values):
    return storage(b"".join(value.to_bytes(8, "little") for value in values))

T = tensor_pb2.Tensor
csr = tensor_pb2.TensorTable(
    tensors=[
        T(dtype="DTYPE_FLOAT32", shape=[1, 2], layout="LAYOUT_SPARSE_CSR", components=[1, 2, 3]),
        T(dtype="DTYPE_INT64", shape=[2]), T(dtype="DTYPE_INT64", shape=[1], storage=1),
        T(dtype="DTYPE_FLOAT32", shape=[1], storage=2),
    ],
    storages=[indices(0, 1), indices(1), storage(bytes(4))],
)
assert Decoder(csr).tensors[0].layout is torch.sparse_csr
quantization = tensor_pb2.Quantization(scales=[0.5], zero_points=[0])
quantized = T(dtype="DTYPE_QINT8", shape=[4], quantization=quantization)
table = tensor_pb2.TensorTable(tensors=[quantized], storages=[storage(bytes(4))])
assert Decoder(table).tensors[0].q_scale() == 0.5
half = T(dtype="DTYPE_COMPLEX32", shape=[1])
assert Decoder(tensor_pb2.TensorTable(tensors=[half], storages=[storage(bytes(4))])).tensors[0].is_complex()
"""


def test_torchs_warnings_are_no_errors_of_a_message_where_filters_make_them_errors():
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", FRESH_PROCESS], check=True)
