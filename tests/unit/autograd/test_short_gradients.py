"""Gradients in short arrive as they were, what has no short form is said in full, and nonsense is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.wire.support import Changes, changed, changes_of_bytes

from gradwire.autograd.gradients import TensorMetadata
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.autograd.responses import ShortResponse, read_short
from gradwire.autograd.short_gradients import GradientsReader, GradientsWriter, ShortRequest, short_request
from gradwire.errors import MalformedMessage
from gradwire.wire import LARGEST_SMALL
from gradwire.wire.ids import AutogradMessageId, ContextId

MESSAGE, PASS = AutogradMessageId(1, 2, 3), AutogradMessageId(4, 5, 6)
CONTEXT = ContextId(7, 8, 9)
LARGE = LARGEST_SMALL // 4 + 1


def expected(*tensors: torch.Tensor) -> list[TensorMetadata]:
    return [TensorMetadata.of(tensor) for tensor in tensors]


def taken(gradients: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]) -> GradientsWriter:
    short = GradientsWriter()
    assert short.add(MESSAGE, gradients, expected(*tensors))
    return short


def request_with(
    gradients: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]
) -> tuple[bytes, list[Any]]:
    body, attachments = short_request(
        PASS,
        CONTEXT,
        taken(gradients, tensors),
        [MESSAGE],
        retain_graph=True,
        skip_leaves=False,
        collect=False,
    )
    return body, [numpy.array(attachment.view) for attachment in attachments]


def response_with(*gradients: torch.Tensor) -> bytes:
    content, _ = taken(gradients, gradients).of_all()
    return ShortResponse(0, 1, None, content, []).body([MESSAGE])


def test_a_request_arrives_as_it_was() -> None:
    tensors = [torch.ones(3), torch.ones(2, 2, dtype=torch.complex64), torch.ones(LARGE), torch.ones(4, 5)]
    sent = [torch.arange(3.0), None, torch.rand(LARGE), torch.tensor(2.5).expand(4, 5)]
    body, attachments = request_with(sent, tensors)
    request = ShortRequest(body)
    assert (request.pass_id, request.message, request.context) == (PASS, MESSAGE, CONTEXT)
    assert (request.retain_graph, request.skip_leaves, request.released) == (True, False, [MESSAGE])
    arrived = request.gradients(expected(*tensors), attachments)
    for one, other in zip(arrived, sent, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert arrived[3] is not None
    assert not any(arrived[3].stride())


ONES = torch.ones(2, 3)
IN_FULL: dict[str, Callable[[], torch.Tensor]] = {
    "another dtype": ONES.double,
    "another shape": lambda: ONES.reshape(3, 2).contiguous(),
    "another layout": ONES.to_sparse,
    "other strides": lambda: torch.ones(3, 2).t(),
    "another device": lambda: torch.ones(2, 3, device="meta"),
    "a conjugate": lambda: torch.ones(2, 3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("gradient", IN_FULL.values(), ids=IN_FULL)
def test_what_is_said_in_full(gradient: Callable[[], torch.Tensor]) -> None:
    assert not GradientsWriter().add(MESSAGE, [gradient()], expected(ONES))


def test_large_memory_that_gradients_share_is_said_in_full() -> None:
    large = torch.ones(LARGE)
    assert not GradientsWriter().add(MESSAGE, [large, large], expected(large, large))


def test_gradients_of_thousands_of_messages_are_said_in_full() -> None:
    short = GradientsWriter()
    assert all(short.add(MESSAGE, [ONES], expected(ONES)) for _ in range(1024))
    assert not short.add(MESSAGE, [ONES], expected(ONES))


def test_thousands_of_large_gradients_are_said_in_full() -> None:
    memory = torch.empty(1025 * LARGE)
    large = [memory[index * LARGE : (index + 1) * LARGE] for index in range(1025)]
    assert GradientsWriter().add(MESSAGE, large[:1024], expected(*large[:1024]))
    assert not GradientsWriter().add(MESSAGE, large, expected(*large))


def test_the_gradients_of_many_tensors_arrive_as_they_were() -> None:
    tensors = [torch.ones(1000) for _ in range(100)]
    sent = [torch.full((1000,), float(index)) if index % 3 else None for index in range(100)]
    body, attachments = request_with(sent, tensors)
    assert [len(one) for one in attachments] == [66 * 4000]
    for one, other in zip(ShortRequest(body).gradients(expected(*tensors), attachments), sent, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


# -- nonsense

attached = st.lists(st.integers(0, 3 * LARGE), max_size=3).map(
    lambda sizes: [numpy.zeros(size, numpy.uint8) for size in sizes]
)


@settings(deadline=None)
@given(changes_of_bytes, attached)
def test_a_request_that_was_changed_is_read_or_refused(changes: Changes, attachments: list[Any]) -> None:
    tensors = [ONES, torch.ones(3, dtype=torch.bool), torch.ones(LARGE)]
    body, _ = request_with([ONES, tensors[1], torch.tensor(1.0).expand(LARGE)], tensors)
    try:
        gradients = ShortRequest(changed(body, changes)).gradients(expected(*tensors), attachments)
    except MalformedMessage:
        return
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert gradient is None or TensorMetadata.of(gradient) == TensorMetadata.of(tensor)


@settings(deadline=None)
@given(changes_of_bytes, attached)
def test_a_response_that_was_changed_is_read_or_refused(changes: Changes, attachments: list[Any]) -> None:
    tensors = [ONES, torch.ones((), dtype=torch.int64)]
    body = changed(response_with(*tensors), changes)
    try:
        _, count, _, _, at = read_short(body)
        reader = GradientsReader(body, at)
        for _ in range(count):
            reader.read_message()
            reader.expect(expected(*tensors))
        reader.read(attachments)
    except MalformedMessage:
        pass


@given(changes_of_bytes)
def test_metadata_that_was_changed_is_read_or_refused(changes: Changes) -> None:
    metadata = AutogradMetadata(CONTEXT, MESSAGE, 7)
    metadata.depends_on, metadata.builds_on, metadata.segment_handle = [MESSAGE, PASS], [PASS], MESSAGE
    body = changed(metadata.in_short([PASS] * 3), changes)
    try:
        AutogradMetadata.from_short(body, 0)
    except MalformedMessage:
        pass


@pytest.mark.parametrize("collect", [True, False])
def test_a_request_says_whether_gradients_are_collected_in_the_context(collect: bool) -> None:
    short = taken([torch.ones(3)], [torch.ones(3)])
    body, _ = short_request(PASS, CONTEXT, short, [], retain_graph=False, skip_leaves=False, collect=collect)
    assert ShortRequest(body).collect_into == (CONTEXT if collect else None)
