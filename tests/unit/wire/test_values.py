"""Python values arrive equal and of the same type, or are refused with the path to what cannot be sent."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import struct
from typing import NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.wire.support import MODES, decode, encode, round_trip

from gradwire.errors import MalformedMessage, TypeMismatch, Unencodable
from gradwire.proto.v1 import autograd_pb2, tensor_pb2, value_pb2
from gradwire.wire import MAX_DEPTH, Decoder, Encoder, TypeRegistry, register_type

relaxed = settings(deadline=None, max_examples=150)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.just(...)
    | st.sampled_from([torch.float32, torch.quint4x2, torch.device("cuda:1"), torch.device("cpu")])
    | st.builds(torch.Size, st.lists(st.integers(0, 5), max_size=4))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(scalars, inner, max_size=4)
        | st.sets(scalars, max_size=4)
        | st.frozensets(scalars, max_size=4)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=20,
)


def same(one: object, other: object) -> bool:
    """Equal, and of equal types all the way down: 1, True and 1.0 are not the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, slice):
        return same((one.start, one.stop, one.step), (other.start, other.stop, other.step))
    return one == other


@relaxed
@given(values)
def test_any_nested_value_arrives_the_same(obj):
    assert same(round_trip(obj), obj)


@pytest.mark.parametrize(
    "number",
    [0.0, -0.0, math.inf, -math.inf, 5e-324, struct.unpack("<d", bytes([1, 2, 3, 4, 5, 6, 0xF7, 0x7F]))[0]],
)
def test_floats_arrive_bit_for_bit(number):
    assert struct.pack("d", round_trip(number)) == struct.pack("d", number)
    arrived = round_trip(complex(number, -number))
    assert struct.pack("dd", arrived.real, arrived.imag) == struct.pack("dd", number, -number)


@pytest.mark.parametrize(
    "edge", [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**500, -(10**500), 127, 128]
)
def test_integers_of_any_size_arrive(edge):
    assert round_trip(edge) == edge


ARRAYS = [
    numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
    numpy.arange(6, dtype=">i4").reshape(2, 3).T,
    numpy.array(3.5),
    numpy.zeros((0, 3), dtype=numpy.int8),
    numpy.array([True, False]),
    numpy.array(["ab", "c"]),
    numpy.array([b"ab", b"c"]),
    numpy.array(["2020-01-01", "NaT"], dtype="datetime64[ns]"),
    numpy.array([1, 2], dtype="timedelta64[25s]"),
    numpy.arange(4, dtype=numpy.complex64)[::-1],
    numpy.array([1.0, 2.0], dtype=numpy.float16),
]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_numpy_arrays_arrive_writable_and_equal(array, mode):
    arrived = round_trip(array, mode)
    assert type(arrived) is numpy.ndarray
    assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
    assert arrived.tobytes() == array.tobytes()
    assert arrived.flags.writeable


@pytest.mark.parametrize(
    "scalar",
    [
        numpy.float32(1.5),
        numpy.float64("nan"),
        numpy.bool_(True),
        numpy.int8(-3),
        numpy.uint64(2**64 - 1),
        numpy.complex64(1j),
        numpy.str_(""),
        numpy.str_("naïve"),
        numpy.bytes_(b"x"),
        numpy.datetime64("2020-01-01"),
        numpy.timedelta64(5, "ms"),
    ],
    ids=repr,
)
def test_numpy_scalars_arrive_as_numpy_scalars(scalar):
    arrived = round_trip(scalar)
    assert type(arrived) is type(scalar)
    assert arrived.tobytes() == scalar.tobytes()
    assert arrived.dtype == scalar.dtype or not scalar.dtype.itemsize


def test_the_same_array_twice_arrives_sharing_memory():
    array = numpy.arange(5)
    one, two = round_trip([array, array])
    one[0] = 9
    assert two[0] == 9


class Color(enum.Enum):
    RED = "r"
    GREEN = "g"


class Level(enum.IntEnum):
    LOW = 1


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: float
    tensor: torch.Tensor | None = None
    norm: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", abs(self.x))


class Pair(NamedTuple):
    left: object
    right: object = None


def test_enums_dataclasses_and_named_tuples_arrive_as_their_own_type():
    tensor = torch.ones(2)
    for obj in (Color.RED, Level.LOW, Rights.READ, Rights.READ | Rights.WRITE, Rights(0), Pair(1, Pair("a"))):
        arrived = round_trip(obj)
        assert type(arrived) is type(obj)
        assert arrived == obj
    arrived = round_trip({"p": Point(-2.5, tensor)})["p"]
    assert (type(arrived), arrived.x, arrived.norm) == (Point, -2.5, 2.5)
    assert torch.equal(arrived.tensor, tensor)


def test_a_field_that_the_constructor_does_not_take_arrives_as_it_was():
    point = Point(1.0)
    object.__setattr__(point, "norm", 7.0)
    assert round_trip(point).norm == 7.0


def test_a_closed_registry_takes_only_what_was_registered():
    types = TypeRegistry()
    with pytest.raises(Unencodable, match=r"result\[0\].*Point is not registered"):
        Encoder(types=types).value([Point(1.0)], "result")
    types.register(Point, name="geometry.Point")
    assert types.name_of(Point) == "geometry.Point"
    assert round_trip(Point(1.0), types=types) == Point(1.0)
    with pytest.raises(TypeMismatch, match=r"'geometry\.Point'.*register_type"):
        decode(*encode(Point(1.0), types=types), types=TypeRegistry())


def test_two_types_of_one_name_are_refused_and_a_redefined_one_takes_its_place():
    types = TypeRegistry(open=True)
    types.register(Point, name="Thing")
    with pytest.raises(ValueError, match=r"'Thing' is taken by .*Point"):
        types.register(Color, name="Thing")
    again = dataclasses.make_dataclass("Point", ["x"], namespace={"__qualname__": Point.__qualname__})
    again.__module__, again.__qualname__ = Point.__module__, Point.__qualname__
    assert types.register(again, name="Thing") is again
    assert types.type_of("Thing") is again
    assert "Thing" in types.names()


def test_register_is_also_a_decorator_and_refuses_other_classes():
    types = TypeRegistry()

    @types.register(name="named")
    @dataclasses.dataclass
    class Local:
        x: int

    assert types.type_of("named") is Local
    with pytest.raises(TypeError, match="neither a dataclass"):
        types.register(int)
    with pytest.raises(TypeError, match="not a class"):
        register_type(3)

    @dataclasses.dataclass
    class Forgetful:
        seed: dataclasses.InitVar[int]

    with pytest.raises(TypeError, match="InitVar"):
        types.register(Forgetful)


def test_what_a_constructor_refuses_is_a_mismatch_of_types():
    types = TypeRegistry()

    @types.register(name="Picky")
    @dataclasses.dataclass
    class Picky:
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise RuntimeError("no")

    message = value_pb2.Value()
    message.record.type = "Picky"
    message.record.fields.add(name="x").value.integer = -1
    decoder = Decoder(tensor_pb2.TensorTable(), types=types)
    with pytest.raises(TypeMismatch, match=r"'Picky' cannot be made of \['x'\].*: RuntimeError: no"):
        decoder.value(message)
    del message.record.fields[:]
    with pytest.raises(TypeMismatch, match="missing 1 required"):
        decoder.value(message)
    message.record.fields.add(name="__class__").value.integer = 1
    with pytest.raises(TypeMismatch, match="no fields"):
        decoder.value(message)


def test_dict_subclasses_travel_as_dict_and_torch_results_as_tuples():
    assert type(round_trip(collections.OrderedDict(a=1))) is dict
    assert round_trip(collections.defaultdict(list, {"a": [1]})) == {"a": [1]}
    result = round_trip(torch.max(torch.eye(2), 0))
    assert type(result) is tuple
    assert torch.equal(result[1], torch.tensor([0, 1]))


class MyList(list):
    pass


class MyStr(str):
    pass


@pytest.mark.parametrize(
    ("obj", "reason"),
    [
        (object(), "object cannot be sent"),
        (MyList(), "MyList, a subclass of list"),
        (MyStr(), "MyStr, a subclass of str"),
        (collections.deque(), "deque"),
        (lambda: 0, "function"),
        (int, "type"),
        (Point, "type"),
        (range(3), "range"),
        (bytearray(b""), "bytearray"),
        ("\ud800", "lone surrogate"),
        (numpy.array([object()]), "dtype object"),
        (numpy.zeros(2, dtype=[("a", "i4")]), "dtype"),
        (numpy.void(b"ab"), "dtype"),
        (numpy.longdouble(1), "depends on the machine"),
        (numpy.ma.masked_array([1]), "MaskedArray, a subclass of ndarray"),
        (numpy.bytes_(b"a\0"), "NUL"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.Generator(), "Generator"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else None,
)
def test_anything_else_is_a_type_error_that_names_the_path(obj, reason):
    with pytest.raises(TypeError, match=rf'^args\[1\]\["mask"\]\.left\[0\]: .*{reason}') as caught:
        Encoder().value([0, {"mask": Pair((obj,))}], "args")
    assert isinstance(caught.value, Unencodable)


def test_the_path_goes_through_keys_sets_and_slices():
    with pytest.raises(Unencodable, match=r'^x\.keys\(\)\["\\ud800"\]: '):
        Encoder().value({"\ud800": 1}, "x")
    with pytest.raises(Unencodable, match=r"^x\{\.\.\.\}: "):
        Encoder().value({object()}, "x")
    with pytest.raises(Unencodable, match=r"^x\.stop: "):
        Encoder().value(slice(0, object()), "x")
    with pytest.raises(Unencodable, match=r"^x\[<dtype>\]: "):
        Encoder().value({torch.float32: MyList()}, "x")


def nested(levels: int, wrap) -> object:
    obj: object = 1
    for _ in range(levels - 1):
        obj = wrap(obj)
    return obj


WRAPS = {"list": lambda x: [x], "dict": lambda x: {"k": x}, "record": Pair, "slice": slice}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_deepest_allowed_value_passes_protobufs_own_limit_inside_a_request(wrap):
    obj = nested(MAX_DEPTH, wrap)
    request = autograd_pb2.ForwardWithAutogradRequest()
    request.kwargs["x"].CopyFrom(Encoder().value(obj, "x"))
    parsed = autograd_pb2.ForwardWithAutogradRequest.FromString(request.SerializeToString())
    assert same(Decoder(parsed.tensors).value(parsed.kwargs["x"]), obj)
    with pytest.raises(Unencodable, match="32 levels deep"):
        Encoder().value(nested(MAX_DEPTH + 1, wrap), "x")


def test_a_list_that_holds_itself_is_refused():
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(Unencodable, match="does a container hold itself"):
        Encoder().value(endless, "x")


class HeldObject:
    def __gradwire_ref__(self) -> value_pb2.RemoteRef:
        return value_pb2.RemoteRef(ref=7, address="here:1")


def test_refs_travel_by_name_and_are_resolved_by_the_receiver():
    encoded = encode([HeldObject()])
    assert decode(*encoded, resolve_ref=lambda ref: (ref.ref, ref.address)) == [(7, "here:1")]
    with pytest.raises(MalformedMessage, match="RemoteRef"):
        decode(*encoded)


def test_replaced_tensors_are_what_values_refer_to():
    encoder = Encoder()
    value = encoder.value({"x": torch.ones(2)}, "x")
    decoder = Decoder(encoder.finish()[0])
    decoder.tensors[0] = replacement = decoder.tensors[0].requires_grad_()
    assert decoder.value(value)["x"] is replacement


def test_public_names_are_what_all_says():
    import gradwire.wire

    for name in gradwire.wire.__all__:
        assert getattr(gradwire.wire, name) is not None
