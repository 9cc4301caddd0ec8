"""Whatever comes in, the only answer to nonsense is MalformedMessage, before memory is allocated for it."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.wire.support import bits, encode

from gradwire.errors import MalformedMessage, ResourceExhausted, TypeMismatch
from gradwire.proto.v1 import tensor_pb2, value_pb2
from gradwire.wire import Decoder, Encoder, Limits

FLOAT32 = tensor_pb2.DTYPE_FLOAT32
INT64 = tensor_pb2.DTYPE_INT64


def table_of(*tensors: tensor_pb2.Tensor, content: bytes = bytes(48)) -> tensor_pb2.TensorTable:
    storage = tensor_pb2.Storage(size=len(content), inline=content)
    return tensor_pb2.TensorTable(tensors=tensors, storages=[storage])


def strided(shape, strides=(), dtype=FLOAT32, **others) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, strides=strides, **others)


def test_a_valid_table_is_taken():
    assert Decoder(table_of(strided([3, 4]))).tensors[0].shape == (3, 4)


BAD_TENSORS = {
    "more elements than bytes": strided([13]),
    "a product that overflows int64": strided([2**32, 2**32]),
    "a product that overflows to something small": strided([2**62, 4, 2]),
    "a negative size": strided([-1]),
    "two negative sizes": strided([-3, -4]),
    "a negative stride": strided([3, 4], [-4, 1]),
    "too few strides": strided([3, 4], [4]),
    "strides that reach past the end": strided([3, 4], [5, 1]),
    "a stride that overflows int64": strided([3, 4], [2**62, 1]),
    "a huge stride where it is not used": strided([1], [2**63 - 1]),
    "an offset past the end": strided([1], offset=12),
    "an offset that overflows": strided([1], offset=2**64 - 1),
    "an empty tensor past the end": strided([0], offset=13),
    "an empty tensor that torch cannot count": strided([0, 2**62, 2**62]),
    "no dtype": strided([1], dtype=0),
    "an unknown dtype": strided([1], dtype=77),
    "an unknown layout": strided([1], layout=9),
    "a negative layout": strided([1], layout=-1),
    "a missing storage": strided([1], storage=1),
    "components of a strided tensor": strided([1], components=[0]),
    "integers that require grad": strided([1], dtype=INT64, requires_grad=True),
    "quantization of floats": strided([1], quantization=tensor_pb2.Quantization(scales=[1], zero_points=[0])),
    "quantized without scale": strided([1], dtype=tensor_pb2.DTYPE_QINT8),
    "quantized with two scales": strided(
        [2],
        dtype=tensor_pb2.DTYPE_QINT8,
        quantization=tensor_pb2.Quantization(scales=[1, 2], zero_points=[0, 0]),
    ),
    "quantized along an axis that is not there": strided(
        [1],
        dtype=tensor_pb2.DTYPE_QINT8,
        quantization=tensor_pb2.Quantization(scales=[1], zero_points=[0], axis=1),
    ),
    "too many dimensions": strided([1] * 65),
    "a meta tensor with too many elements": strided([2**62], device="meta"),
    "a meta tensor that torch cannot count": strided([2, 2], [2**62, 2**62], device="meta"),
}


@pytest.mark.parametrize("tensor", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_a_tensor_is_refused_with(tensor):
    with pytest.raises(MalformedMessage, match="tensor 0"):
        Decoder(table_of(tensor))


def test_lengths_that_lie_are_refused():
    for size in (0, 47, 49, 2**63):
        storage = tensor_pb2.Storage(size=size, inline=bytes(48))
        with pytest.raises(MalformedMessage, match="48 were received"):
            Decoder(tensor_pb2.TensorTable(storages=[storage]))
    with pytest.raises(MalformedMessage, match="0 were received"):
        Decoder(tensor_pb2.TensorTable(storages=[tensor_pb2.Storage(size=4)]))


def test_attachments_must_be_there_once_and_of_the_size_said():
    def table(*indices: int, size: int = 4) -> tensor_pb2.TensorTable:
        return tensor_pb2.TensorTable(
            storages=[tensor_pb2.Storage(size=size, attachment=index) for index in indices]
        )

    four = numpy.zeros(4, dtype=numpy.uint8)
    Decoder(table(0), [four])
    for bad, attachments in [
        (table(0), []),
        (table(1), [four]),
        (table(0, 0), [four]),
        (table(0, size=5), [four]),
    ]:
        with pytest.raises(MalformedMessage):
            Decoder(bad, attachments)


def test_a_claim_of_gigabytes_allocates_nothing():
    tracemalloc.start()
    with pytest.raises(MalformedMessage):
        Decoder(table_of(strided([2**30]), strided([4])))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_limits_bound_tensors_and_elements():
    many = table_of(*[strided([1])] * 3)
    with pytest.raises(MalformedMessage, match="3 tensors were received"):
        Decoder(many, limits=Limits(max_tensors=2))
    with pytest.raises(MalformedMessage, match="dimensions"):
        Decoder(table_of(strided([3, 4])), limits=Limits(max_dims=1))


@pytest.mark.parametrize(
    "tensor",
    [
        lambda size: strided([size], [0]),
        lambda size: strided([size // 4, 4], [0, 1]),
        lambda size: strided([size], [0], offset=11),
        lambda size: strided([size], device="meta"),
    ],
    ids=["expanded", "rows", "offset", "meta"],
)
def test_what_a_shape_spans_without_bytes_is_bounded(tensor):
    limits = Limits(max_tensor_elements=1000)
    assert Decoder(table_of(tensor(1000)), limits=limits).tensors[0].numel() == 1000
    with pytest.raises(ResourceExhausted, match=r"spans 1004 elements.*at most 1000"):
        Decoder(table_of(tensor(1004)), limits=limits)


def test_what_has_its_bytes_is_bounded_by_them_alone():
    limits = Limits(max_tensor_elements=3)
    for shape, strides in (([12], ()), ([3, 4], ()), ([3, 4], (1, 3)), ([2, 4], (0, 1)), ([12], (0,))):
        assert Decoder(table_of(strided(shape, strides)), limits=limits).tensors[0].shape == tuple(shape)
    with pytest.raises(ResourceExhausted, match="spans 13 elements"):
        Decoder(table_of(strided([13], [0])), limits=limits)


def test_what_a_sparse_tensor_spans_is_bounded():
    limits = Limits(max_tensor_elements=1000)
    for layout, indices in (
        (tensor_pb2.LAYOUT_SPARSE_COO, [[[0, 9], [1, 2]]]),
        (tensor_pb2.LAYOUT_SPARSE_CSR, [[0, 1, *[1] * 8, 2], [1, 2]]),
    ):
        for columns, is_taken in ((100, True), (101, False)):
            table = sparse_table(layout, [10, columns], indices)
            if is_taken:
                (tensor, *_) = Decoder(table, limits=limits).tensors
                assert tensor.shape == (10, columns)
            else:
                with pytest.raises(ResourceExhausted, match="spans 1010 elements"):
                    Decoder(table, limits=limits)


def test_a_numpy_array_spans_no_more_than_its_bytes():
    table = tensor_pb2.TensorTable(storages=[tensor_pb2.Storage(size=8, inline=bytes(8))])
    for shape in ([2], [2, 2], [0, 2**40], [2**40, 2**40]):
        value = array(dtype="<f8", shape=shape)
        with pytest.raises(MalformedMessage):
            Decoder(table).value(value)


def sparse_table(layout, shape, components, values=(1.0, 2.0), **others) -> tensor_pb2.TensorTable:
    """A sparse tensor whose index components are given as lists."""
    encoder = Encoder()
    for component in components:
        encoder.tensor(torch.tensor(component))
    encoder.tensor(torch.tensor(values))
    parts = encoder.finish()[0]
    count = len(components) + 1
    sparse = tensor_pb2.Tensor(
        dtype=FLOAT32, shape=shape, layout=layout, components=range(1, count + 1), **others
    )
    return tensor_pb2.TensorTable(tensors=[sparse, *parts.tensors], storages=parts.storages)


COO, CSR = tensor_pb2.LAYOUT_SPARSE_COO, tensor_pb2.LAYOUT_SPARSE_CSR
BAD_SPARSE = {
    "an index out of bounds": sparse_table(COO, [3], [[[0, 3]]]),
    "a negative index": sparse_table(COO, [3], [[[0, -1]]]),
    "fewer indices than values": sparse_table(COO, [3], [[[0]]]),
    "a flat list of indices": sparse_table(COO, [3], [[0, 1]]),
    "indices that are floats": sparse_table(COO, [3], [[[0.0, 1.0]]]),
    "indices called sorted that are not": sparse_table(COO, [3], [[[1, 0]]], coalesced=True),
    "indices called unique that are not": sparse_table(COO, [3], [[[1, 1]]], coalesced=True),
    "a shape of other dimensions": sparse_table(COO, [3, 3], [[[0, 1]]]),
    "a negative shape": sparse_table(COO, [-3], [[[0, 1]]]),
    "a shape that torch cannot count": sparse_table(COO, [2**62, 2**62], [[[0, 1], [0, 1]]]),
    "row ends that go down": sparse_table(CSR, [3, 3], [[0, 2, 1, 2], [0, 1]]),
    "row ends that do not start at zero": sparse_table(CSR, [3, 3], [[1, 1, 1, 2], [0, 1]]),
    "row ends past the values": sparse_table(CSR, [3, 3], [[0, 1, 2, 3], [0, 1]]),
    "too few row ends": sparse_table(CSR, [3, 3], [[0, 2], [0, 1]]),
    "a column out of bounds": sparse_table(CSR, [1, 3], [[0, 2], [0, 3]]),
    "columns of another type than rows": sparse_table(CSR, [1, 3], [[0, 2], [0.0, 1.0]]),
    "blocks of no size": sparse_table(
        tensor_pb2.LAYOUT_SPARSE_BSR, [4, 4], [[0, 1, 2], [0, 1]], values=[[[], []], [[], []]]
    ),
    "too few components": sparse_table(CSR, [1, 3], [[0, 2]]),
}


@pytest.mark.parametrize("table", BAD_SPARSE.values(), ids=BAD_SPARSE)
def test_a_sparse_tensor_is_refused_with(table):
    with pytest.raises(MalformedMessage, match="tensor 0"):
        Decoder(table)


def test_components_may_not_be_sparse_themselves_or_missing():
    for components in ([0, 0], [1, 9], [1, 0]):
        sparse = tensor_pb2.Tensor(dtype=FLOAT32, shape=[3], layout=COO, components=components)
        with pytest.raises(MalformedMessage, match="component"):
            Decoder(table_of(sparse, strided([1])))
    sparse = tensor_pb2.Tensor(dtype=INT64, shape=[3], layout=COO, components=[1, 2])
    with pytest.raises(MalformedMessage, match="values"):
        Decoder(table_of(sparse, strided([1, 2], dtype=INT64), strided([2])))


def test_indices_cannot_be_changed_through_another_tensor_once_they_were_checked():
    table = sparse_table(CSR, [1, 3], [[0, 2], [0, 1]])
    decoder = Decoder(table)
    decoder.tensors[2].fill_(1_000_000)
    assert decoder.tensors[0].col_indices().tolist() == [0, 1]


def test_indices_that_are_more_than_their_bytes_are_refused_before_they_are_copied():
    sparse = tensor_pb2.Tensor(dtype=FLOAT32, shape=[3], layout=COO, components=[1, 2])
    table = table_of(sparse, strided([1, 2**28], [0, 0], dtype=INT64), strided([2**28], [0]))
    with pytest.raises(MalformedMessage, match="larger than their storage"):
        Decoder(table)


def value_bytes(tag: int, content: bytes) -> bytes:
    """A length-delimited field, written by hand."""
    length = len(content)
    varint = b""
    while length > 0x7F:
        varint += bytes([length & 0x7F | 0x80])
        length >>= 7
    return bytes([tag << 3 | 2]) + varint + bytes([length]) + content


def test_ten_thousand_levels_from_hand_built_bytes_are_refused():
    content = b"\x18\x02"
    for _ in range(10_000):
        content = value_bytes(9, value_bytes(1, content))
    with pytest.raises(DecodeError):
        value_pb2.Value.FromString(content)
    message = deepest = value_pb2.Value()
    for _ in range(40):
        deepest = deepest.list.items.add()
    deepest.integer = 1
    with pytest.raises(MalformedMessage, match="32 levels deep"):
        Decoder(tensor_pb2.TensorTable()).value(message)


def array(**fields) -> value_pb2.Value:
    return value_pb2.Value(array=value_pb2.NumpyArray(**fields))


def items(kind: str, *values: value_pb2.Value) -> value_pb2.Value:
    return value_pb2.Value(**{kind: value_pb2.List(items=values)})


ONE, LIST = value_pb2.Value(integer=1), items("list")
BAD_VALUES = {
    "no kind": value_pb2.Value(),
    "an unknown singleton": value_pb2.Value(singleton=9),
    "a tensor that is not there": value_pb2.Value(tensor=1),
    "an unknown dtype": value_pb2.Value(dtype="float33"),
    "a dtype that is another name of torch": value_pb2.Value(dtype="__name__"),
    "an unknown device": value_pb2.Value(device="tpu9000"),
    "no device": value_pb2.Value(device=""),
    "a device index too large": value_pb2.Value(device="cuda:9999999999"),
    "a set of lists": items("set", LIST),
    "a set with an item twice": items("set", ONE, ONE),
    "a dict with a list for a key": value_pb2.Value(
        dict=value_pb2.Dict(entries=[value_pb2.Dict.Entry(key=LIST, value=ONE)])
    ),
    "a dict entry without a value": value_pb2.Value(
        dict=value_pb2.Dict(entries=[value_pb2.Dict.Entry(key=ONE)])
    ),
    "a slice without parts": value_pb2.Value(slice=value_pb2.Slice()),
    "an array of objects": array(dtype="|O8", shape=[6]),
    "an array of records": array(dtype="i4,f4", shape=[6]),
    "an array of no dtype": array(dtype="", shape=[6]),
    "an array larger than its bytes": array(dtype="<f8", shape=[7]),
    "an array smaller than its bytes": array(dtype="<f8", shape=[5]),
    "an array of negative shape": array(dtype="<f8", shape=[-2, -3]),
    "an array whose product overflows": array(dtype="<f8", shape=[2**32, 2**32]),
    "an array of a missing storage": array(dtype="<f8", shape=[6], storage=1),
    "a scalar with a shape": array(dtype="<f8", shape=[6], scalar=True),
    "an array of empty strings": array(dtype="|S0", shape=[6]),
    "a ref where none is expected": value_pb2.Value(ref=value_pb2.RemoteRef(ref=1)),
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_value_is_refused_with(value):
    decoder = Decoder(table_of(strided([12])))
    with pytest.raises(MalformedMessage, match=r"^args\[0\]: "):
        decoder.value(value, "args[0]")


UNKNOWN_TYPES = {
    "a record": value_pb2.Value(record=value_pb2.Record(type="os.system")),
    "an enum": value_pb2.Value(enum_member=value_pb2.EnumMember(type="X", member="Y")),
}


@pytest.mark.parametrize("value", UNKNOWN_TYPES.values(), ids=UNKNOWN_TYPES)
def test_a_value_of_an_unknown_type_is_a_mismatch_and_no_nonsense(value):
    with pytest.raises(TypeMismatch, match=r"^args\[0\]: the receiving end knows no type"):
        Decoder(table_of(strided([12]))).value(value, "args[0]")


@pytest.fixture(scope="module")
def samples() -> list[tuple[bytes, bytes, list[numpy.ndarray]]]:
    base = torch.arange(24.0).view(4, 6)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        csr, bsc = torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_bsc((2, 2))
    objects = [
        [base, base[:, ::2], base.t()[1:], {"a": 1.5, (1, "b"): {2, 3}}],
        [base.to_sparse(), torch.ones(2, 2, dtype=torch.bfloat16).expand(3, 2, 2), numpy.arange(5), ...],
        [csr, torch.empty(3, device="meta"), 2**80, slice(1, None), torch.Size([1])],
        [
            bsc,
            numpy.datetime64("2020-01-01"),
            torch.device("cuda:1"),
            b"x",
            None,
        ],
    ]
    return [encode(obj, attach_from) for obj in objects for attach_from in (None, 32)]


def touch(obj: object) -> None:
    """Reads every element, as a served function would."""
    if isinstance(obj, torch.Tensor):
        if obj.is_meta or obj.numel() > 100_000:
            return
        if obj.layout is torch.strided:
            bits(obj)
        else:
            obj.to_dense()
    elif isinstance(obj, numpy.ndarray):
        obj.tobytes()
    elif isinstance(obj, dict):
        touch(list(obj.items()))
    elif isinstance(obj, list | tuple | set | frozenset):
        for item in obj:
            touch(item)


@pytest.mark.filterwarnings("ignore:Sparse")
@settings(deadline=None, max_examples=1500)
@given(data=st.data())
def test_random_mutations_of_valid_messages_raise_nothing_else(samples, data):
    value, table, attachments = data.draw(st.sampled_from(samples))
    mutated = [bytearray(value), bytearray(table)]
    for _ in range(data.draw(st.integers(1, 4))):
        part = mutated[data.draw(st.integers(0, 1))]
        if not part:
            continue
        at = data.draw(st.integers(0, len(part) - 1))
        match data.draw(st.sampled_from(["set", "flip", "delete", "insert"])):
            case "set":
                part[at] = data.draw(st.integers(0, 255))
            case "flip":
                part[at] ^= 1 << data.draw(st.integers(0, 7))
            case "delete":
                del part[at : at + data.draw(st.integers(1, 4))]
            case "insert":
                part[at:at] = data.draw(st.binary(min_size=1, max_size=4))
    try:
        decoder = Decoder(
            tensor_pb2.TensorTable.FromString(bytes(mutated[1])),
            [attachment.copy() for attachment in attachments],
            limits=Limits(max_tensor_elements=2**24),
        )
        touch(decoder.value(value_pb2.Value.FromString(bytes(mutated[0]))))
        touch(decoder.tensors)
    except (MalformedMessage, ResourceExhausted, TypeMismatch, DecodeError):
        pass
