"""Values that go by their structure and their content arrive as they would in full, what cannot go so goes in
full, and nonsense is refused."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.wire.support import Changes, assert_same_bits, changed, changes_of_bytes, taken_apart

from gradwire.errors import MalformedMessage
from gradwire.wire import flatten
from gradwire.wire.layouts import Layout
from gradwire.wire.tensor_contents import LARGEST_SMALL

LARGE = LARGEST_SMALL // 4 + 1


def written(values: Sequence[object], layout: Layout | None = None) -> tuple[bytes, list[Any]]:
    flat = taken_apart(values)
    body, attachments = (layout or Layout(len(values), flat)).write(flat)
    return body, [numpy.array(attachment.view) for attachment in attachments]


def round_trip(values: Sequence[object], head: bytes = b"") -> list[Any]:
    body, attachments = written(values)
    layout = Layout(len(values), taken_apart(values))
    return layout.read(head + body, len(head), attachments).values()


def assert_same(arrived: Any, sent: Any) -> None:
    if isinstance(sent, torch.Tensor):
        assert_same_bits(arrived, sent)
    elif isinstance(sent, list | tuple | dict):
        assert type(arrived) is type(sent)
        assert len(arrived) == len(sent)
        if isinstance(sent, dict):
            assert list(arrived) == list(sent)
            arrived, sent = arrived.values(), sent.values()
        for one, other in zip(arrived, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, float):
        assert struct.pack("d", arrived) == struct.pack("d", sent)
    else:
        assert type(arrived) is type(sent)
        assert arrived == sent


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([..., torch.float32])
)
tensors = st.builds(
    lambda shape, dtype: torch.arange(int(numpy.prod(shape))).reshape(shape).to(dtype),
    st.lists(st.integers(1, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.complex128, torch.int8, torch.bool, torch.float64]),
)
values = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(values, max_size=5), st.binary(max_size=7))
def test_values_arrive_as_they_were(sent: list[object], head: bytes) -> None:
    assert_same(round_trip(sent, head), sent)


@given(st.lists(values, max_size=4), st.lists(values, max_size=4))
def test_one_key_means_one_structure(one: list[object], other: list[object]) -> None:
    flat, second = taken_apart(one), taken_apart(other)
    if flat.key == second.key and len(one) == len(other):
        layout = Layout(len(one), flat)
        body, _ = layout.write(second)
        assert_same(layout.read(body, 0, []).values(), other)


def test_scalars_of_equal_value_and_other_type_have_other_keys() -> None:
    keys = [taken_apart([value]).key for value in (1, 1.0, True, "1", None, ..., torch.tensor(1), [1], (1,))]
    assert all(one != other for index, one in enumerate(keys) for other in keys[:index])


def test_requires_grad_is_part_of_the_structure() -> None:
    learned, given_ = torch.ones(2, requires_grad=True), torch.ones(2)
    assert taken_apart([learned]).key != taken_apart([given_]).key
    assert Layout(2, taken_apart([given_, learned])).slots == [1]


def test_tensors_that_arrived_can_be_used_as_any_others() -> None:
    small, large = torch.arange(6.0).reshape(2, 3), torch.ones(LARGE, 1)
    for arrived in round_trip([small, large]):
        arrived += 1
        assert arrived.is_contiguous()
        assert arrived.data_ptr() % arrived.element_size() == 0
    (arrived,) = round_trip([small])
    arrived.resize_(100)


def test_the_device_of_a_users_block_does_not_matter() -> None:
    with torch.device("meta"):
        (arrived,) = round_trip([torch.ones(2, device="cpu")])
    assert arrived.tolist() == [1, 1]


def test_large_tensors_are_attached_and_many_small_ones_together() -> None:
    assert [len(one) for one in written([torch.ones(LARGE), torch.ones(3)])[1]] == [LARGE * 4]
    many = [torch.full((1000,), float(index)) for index in range(20)]
    body, attachments = written([*many, torch.ones(LARGE), 7])
    assert len(body) == 8
    assert [len(one) for one in attachments] == [20 * 4000, LARGE * 4]
    sent = [*many, torch.ones(LARGE), 7]
    assert_same(round_trip(sent), sent)


@pytest.mark.parametrize("sizes", [[], [79_999], [80_001], [80_000] * 2, [80_000, 0]])
def test_small_tensors_of_another_size_together_are_refused(sizes: list[int]) -> None:
    layout = Layout(20, taken_apart([torch.ones(1000) for _ in range(20)]))
    with pytest.raises(MalformedMessage):
        layout.read(b"", 0, [numpy.zeros(size, numpy.uint8) for size in sizes])
    with pytest.raises(MalformedMessage):
        layout.read(bytes(1), 0, [numpy.zeros(80_000, numpy.uint8)])


BASE = torch.arange(12.0)
UNPLANNED: dict[str, Callable[[], object]] = {
    "a large integer": lambda: 2**63,
    "bytes": lambda: b"bytes",
    "a complex number": lambda: 1j,
    "a set": lambda: {1},
    "a dictionary by number": lambda: {1: 2},
    "a long string": lambda: "x" * 257,
    "a list within lists": lambda: [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]],
    "a subclass of a type": lambda: type("Number", (int,), {})(3),
    "the same tensor twice": lambda: [BASE, BASE],
    "views of the same memory": lambda: [BASE[:7], BASE[5:]],
    "a transposed tensor": lambda: BASE.reshape(3, 4).t(),
    "an expanded tensor": lambda: torch.ones(1).expand(5),
    "an empty tensor": lambda: torch.ones(0),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a sparse tensor by rows": lambda: torch.eye(3).to_sparse_csr(),
    "a tensor without memory": lambda: torch.ones(3, device="meta"),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a conjugated view": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "a negated view": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "a subclass of tensors": lambda: torch.ones(3).as_subclass(type("Mine", (torch.Tensor,), {})),
    "too many leaves": lambda: list(range(5000)),
}


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors",
    "ignore:Sparse CSR tensor support",
    "ignore:torch.quantize_per",
)
@pytest.mark.parametrize("value", UNPLANNED.values(), ids=UNPLANNED)
def test_what_goes_in_full(value: Callable[[], object]) -> None:
    assert flatten([value()]) is None


def tree(depth: int) -> list[Any]:
    return [tree(depth - 1)] * 10 if depth else []


@pytest.mark.parametrize("value", [[0] * 10**7, dict.fromkeys(map(str, range(10**6))), tree(14)])
def test_what_is_far_too_large_for_a_plan_is_given_up_at_once(value: object) -> None:
    started = time.thread_time()
    assert flatten([value]) is None
    assert flatten([1] * 5000) is None
    assert time.thread_time() - started < 0.1


def test_views_that_share_no_byte_go_by_a_plan() -> None:
    sent = [BASE[:5], BASE[5:]]
    assert_same(round_trip(sent), sent)


@pytest.mark.parametrize("size", [0, 3, 19, 21, 400])
def test_a_body_of_another_size_is_refused(size: int) -> None:
    layout = Layout(2, taken_apart([7, torch.ones(3)]))
    with pytest.raises(MalformedMessage):
        layout.read(bytes(size), 0, [])


@pytest.mark.parametrize("sizes", [[], [LARGE * 4 - 1], [LARGE * 4 + 1], [LARGE * 4] * 2, [0, LARGE * 4]])
def test_attachments_of_other_sizes_are_refused(sizes: list[int]) -> None:
    layout = Layout(1, taken_apart([torch.ones(LARGE)]))
    with pytest.raises(MalformedMessage):
        layout.read(b"", 0, [numpy.zeros(size, numpy.uint8) for size in sizes])


@settings(max_examples=300, deadline=None)
@given(st.lists(values, max_size=5), changes_of_bytes, st.lists(st.integers(0, 9), max_size=2))
def test_a_body_that_was_changed_is_read_or_refused(
    sent: list[object], changes: Changes, attached: list[int]
) -> None:
    flat = taken_apart(sent)
    layout = Layout(len(sent), flat)
    body, _ = layout.write(flat)
    try:
        arrived = layout.read(
            changed(body, changes), 0, [numpy.zeros(size, numpy.uint8) for size in attached]
        )
    except MalformedMessage:
        return
    assert taken_apart(arrived.values()).key == [*flat.key]
