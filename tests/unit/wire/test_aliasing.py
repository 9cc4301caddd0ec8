"""Tensors that share memory arrive sharing memory, and no other byte leaves the process."""

from __future__ import annotations

import gc

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.wire.support import MODES, assert_same_bits, encode, round_trip

from gradwire.errors import GradwireError
from gradwire.proto.v1 import tensor_pb2
from gradwire.wire import Decoder, Encoder, find_codec

relaxed = settings(deadline=None, max_examples=150)
both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@both_modes
def test_the_same_tensor_twice_arrives_as_one_object(mode):
    tensor = torch.ones(3)
    one, two, three = round_trip([tensor, {"again": tensor}, torch.ones(3)], mode)
    assert one is two["again"]
    assert one is not three


@both_modes
def test_writing_to_a_view_at_the_receiver_shows_in_its_base(mode):
    base = torch.arange(24.0).view(4, 6)
    arrived = round_trip([base, base[1], base[:, ::2], base.t(), base.view(torch.int32)], mode)
    for tensor, sent in zip(
        arrived, [base, base[1], base[:, ::2], base.t(), base.view(torch.int32)], strict=True
    ):
        assert_same_bits(tensor, sent)
        assert tensor.stride() == sent.stride()
    arrived[1].fill_(-1)
    assert (arrived[0][1] == -1).all()
    assert (arrived[3][:, 1] == -1).all()
    arrived[2][3, 0] = 99
    assert arrived[0][3, 0] == 99


@st.composite
def groups(draw: st.DrawFn) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A base of distinct bytes, and views of it: slices, steps, columns, other dtypes."""
    base = torch.arange(240, dtype=torch.uint8)
    views = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64]))
        count = 240 // dtype.itemsize
        offset = draw(st.integers(0, count - 1))
        columns, rows = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        inner, outer = draw(st.integers(0, 3)), draw(st.integers(0, 6))
        if offset + (columns - 1) * inner + (rows - 1) * outer < count:
            views.append(base.view(dtype).as_strided((rows, columns), (outer, inner), offset))
    return base, views


def covered(base: torch.Tensor, views: list[torch.Tensor]) -> set[int]:
    """The bytes of the base that the views look at."""
    marks = numpy.zeros(len(base), dtype=bool)
    for view in views:
        start = view.data_ptr() - base.data_ptr()
        for row in range(view.shape[0]):
            for column in range(view.shape[1]):
                at = start + (row * view.stride(0) + column * view.stride(1)) * view.itemsize
                marks[at : at + view.itemsize] = True
    return set(numpy.flatnonzero(marks).tolist())


@relaxed
@given(groups(), st.sampled_from(list(MODES.values())))
def test_any_group_of_views_arrives_with_the_same_bits_and_the_same_overlaps(group, mode):
    base, views = group
    arrived = round_trip(views, mode)
    for tensor, sent in zip(arrived, views, strict=True):
        assert_same_bits(tensor, sent)
    for one in range(len(views)):
        for other in range(one):
            shared = covered(base, [views[one]]) & covered(base, [views[other]])
            extents = [(view.data_ptr(), view) for view in (arrived[one], arrived[other])]
            if shared:
                same_distance = views[one].data_ptr() - views[other].data_ptr()
                assert extents[0][0] - extents[1][0] == same_distance
                assert (
                    arrived[one].untyped_storage().data_ptr() == arrived[other].untyped_storage().data_ptr()
                )


@relaxed
@given(groups(), st.sampled_from(list(MODES.values())))
def test_no_byte_is_sent_that_no_tensor_covers(group, mode):
    base, views = group
    encoder = Encoder(attach_from=mode)
    encoder.value(views, "views")
    table, attachments = encoder.finish()
    sent = b"".join(storage.inline for storage in table.storages)
    sent += b"".join(bytes(attachment.view) for attachment in attachments)
    # Every byte of the base has its own value, and zeros stand for what is not sent.
    assert set(sent) - {0} <= covered(base, views)


def test_columns_of_one_matrix_cost_two_columns_not_the_matrix():
    matrix = torch.randn(1000, 500)
    _, table, _ = encode([matrix[:, 0], matrix[:, 1]])
    assert len(table) < 2 * 4 * 1000 + 200


def test_disjoint_slices_of_one_storage_become_separate_storages():
    base = torch.randn(100)
    one, two = round_trip([base[:10], base[90:]])
    assert one.untyped_storage().nbytes() == 40
    assert one.untyped_storage().data_ptr() != two.untyped_storage().data_ptr()


def test_views_of_other_dtypes_at_odd_addresses_share_memory():
    base = torch.arange(64, dtype=torch.uint8)
    narrow, wide = base[3:9], base.view(torch.int32)[1:4]
    one, two = round_trip([narrow, wide])
    assert_same_bits(one, narrow)
    assert_same_bits(two, wide)
    one[1] = 200
    assert two.view(torch.uint8)[0] == 200


def test_two_storages_over_one_numpy_array_are_seen_as_one_memory():
    array = numpy.arange(100, dtype=numpy.float32)
    one, two = torch.from_numpy(array[:60]), torch.from_numpy(array[40:])
    for mode in MODES.values():
        left, right = round_trip([one, two], mode)
        assert_same_bits(left, one)
        assert_same_bits(right, two)
        left[50] = -1
        assert right[10] == -1


def test_sparse_components_share_memory_with_the_tensors_they_were_made_of():
    values = torch.ones(2)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), values, (3,), check_invariants=True)
    arrived_values, arrived = round_trip([values, sparse])
    arrived_values.fill_(5)
    assert arrived.to_dense().tolist() == [5.0, 5.0, 0.0]


def test_an_attachment_is_the_tensors_own_memory():
    tensor = torch.randn(64, 1024)
    encoder = Encoder()
    encoder.value([tensor.t(), tensor[:32]], "args")
    _, attachments = encoder.finish()
    assert len(attachments) == 1
    view = attachments[0].view
    assert (view.format, view.contiguous, view.nbytes, attachments[0].size) == (
        "B",
        True,
        tensor.nbytes,
        tensor.nbytes,
    )
    assert numpy.frombuffer(view, dtype=numpy.uint8).ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize(
    ("sizes", "attached"),
    [([100], []), ([101], [101]), ([40, 60], []), ([40, 61], [61]), ([40, 61, 60], [61]), ([9] * 20, [])],
)
def test_what_fits_travels_in_the_message_the_rest_beside_it(sizes, attached):
    encoder = Encoder(attach_from=10, inline_bytes=100)
    for size in sizes:
        encoder.tensor(torch.zeros(size, dtype=torch.uint8))
    table, attachments = encoder.finish()
    assert [attachment.size for attachment in attachments] == attached
    assert [storage.size for storage in table.storages] == sizes


def test_what_is_encoded_takes_room_in_the_message_too():
    encoder = Encoder(attach_from=0, inline_bytes=100_000, codec=find_codec(tensor_pb2.CODEC_BF16))
    for _ in range(10):
        encoder.tensor(torch.randn(15_000))
    assert [attachment.size for attachment in encoder.finish()[1]] == [30_000] * 7


@pytest.mark.parametrize("shape", [(8,), (2, 4), (1, 8, 1), (2, 2, 2)])
def test_what_arrives_is_nobodys_view(shape):
    """Else autograd would let nobody write to it."""
    for mode in (None, 0):
        arrived = round_trip(torch.ones(shape), attach_from=mode)
        assert arrived.shape == shape
        assert not arrived._is_view()
        assert arrived._base is None


@pytest.mark.parametrize("mode", [None, 0, 1000], ids=["inline", "attached", "both"])
def test_many_tensors_are_told_apart_from_those_that_share_memory(mode):
    base = torch.arange(2000.0)
    apart = [torch.full((size,), float(size)) for size in range(1, 100)]
    together = [base, base[500:700], base.view(20, 100)]
    for sent in (apart, [*apart, *together], [base[:1000], base[1000:]], [base[:1001], base[1000:]]):
        arrived = round_trip(sent, attach_from=mode)
        for one, other in zip(sent, arrived, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
        arrived[-1].fill_(-1)
        assert [bool((one == -1).any()) for one in arrived[:-1]] == [
            one.untyped_storage().data_ptr() == sent[-1].untyped_storage().data_ptr()
            and one.data_ptr() < sent[-1].data_ptr() + sent[-1].nbytes
            and sent[-1].data_ptr() < one.data_ptr() + one.nbytes
            for one in sent[:-1]
        ]


def test_a_view_of_an_attachment_keeps_the_memory_alive():
    encoder = Encoder(attach_from=0)
    encoder.tensor(torch.full((100_000,), 7, dtype=torch.uint8))
    view = encoder.finish()[1][0].view
    del encoder
    gc.collect()
    assert bytes(view) == b"\x07" * 100_000


def test_a_tensor_modified_while_being_sent_is_noticed():
    tensor = torch.randn(100)
    encoder = Encoder(attach_from=0)
    encoder.tensor(tensor[10:60])
    attachment = encoder.finish()[1][0]
    attachment.check_unmodified()
    tensor.add_(1)
    with pytest.raises(GradwireError, match="modified in place while being sent"):
        attachment.check_unmodified()


def test_inference_tensors_have_no_version_and_are_not_checked():
    with torch.inference_mode():
        tensor = torch.randn(100)
        encoder = Encoder(attach_from=0)
        encoder.tensor(tensor)
        attachment = encoder.finish()[1][0]
        tensor.add_(1)
        attachment.check_unmodified()


def test_attached_memory_is_used_by_the_receiver_without_copying():
    encoder = Encoder(attach_from=0)
    encoder.value([torch.arange(8.0), numpy.arange(8)], "args")
    table, attachments = encoder.finish()
    handed_over = [numpy.array(attachment.view) for attachment in attachments]
    decoder = Decoder(tensor_pb2.TensorTable.FromString(table.SerializeToString()), handed_over)
    assert decoder.tensors[0].data_ptr() in {array.ctypes.data for array in handed_over}


def test_read_only_memory_is_copied_because_tensors_can_be_written_to():
    encoder = Encoder(attach_from=0)
    encoder.tensor(torch.arange(8.0))
    table, attachments = encoder.finish()
    content = bytes(attachments[0].view)
    decoder = Decoder(table, [memoryview(content)])
    decoder.tensors[0].fill_(0)
    assert content == torch.arange(8.0).numpy().tobytes()


def test_an_encoder_is_for_one_message():
    encoder = Encoder()
    encoder.finish()
    with pytest.raises(RuntimeError, match="one message"):
        encoder.finish()
