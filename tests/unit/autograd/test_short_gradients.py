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

from gradwire import wire
from gradwire.autograd.gradients import TensorMetadata
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.autograd.responses import ShortResponse, read_short
from gradwire.autograd.short_gradients import (
    ShortGradients,
    ShortRequest,
    read_gradients,
    read_heads,
    short_request,
)
from gradwire.errors import MalformedMessage
from gradwire.wire import LARGEST_INLINE
from gradwire.wire.ids import AutogradMessageId, ContextId

MESSAGE, PASS, CONTEXT = AutogradMessageId(1, 2), AutogradMessageId(3, 4), ContextId(5, 6)
LARGE = LARGEST_INLINE // 4 + 1


def expected(*tensors: torch.Tensor) -> list[TensorMetadata]:
    return [TensorMetadata.of(tensor) for tensor in tensors]


def taken(gradients: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]) -> ShortGradients:
    short = ShortGradients()
    assert short.add(MESSAGE, gradients, expected(*tensors))
    return short


def request_with(
    gradients: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]
) -> tuple[bytes, list[Any]]:
    body, attachments = short_request(
        PASS, CONTEXT, taken(gradients, tensors), [MESSAGE], retain_graph=True, skip_leaves=False
    )
    return body, [numpy.array(attachment.view) for attachment in attachments]


def response_with(*gradients: torch.Tensor) -> bytes:
    content, _ = taken(gradients, gradients).with_heads()
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
    assert not ShortGradients().add(MESSAGE, [gradient()], expected(ONES))


def test_large_memory_that_gradients_share_is_said_in_full() -> None:
    large = torch.ones(LARGE)
    assert not ShortGradients().add(MESSAGE, [large, large], expected(large, large))


def test_gradients_of_thousands_of_messages_are_said_in_full() -> None:
    short = ShortGradients()
    assert all(short.add(MESSAGE, [ONES], expected(ONES)) for _ in range(1024))
    assert not short.add(MESSAGE, [ONES], expected(ONES))


def test_thousands_of_gradients_are_said_in_full() -> None:
    short = ShortGradients()
    assert all(short.add(MESSAGE, [ONES] * 64, expected(*[ONES] * 64)) for _ in range(16))
    assert not short.add(MESSAGE, [ONES], expected(ONES))


def test_a_message_of_many_tensors_is_said_in_full() -> None:
    assert not ShortGradients().add(MESSAGE, [ONES] * 65, expected(*[ONES] * 65))


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
        heads, at = read_heads(body, at, count)
        reader = wire.MemoryReader(body, at, attachments)
        for _, slots, repeated in heads:
            read_gradients(reader, slots, repeated, expected(*tensors))
        reader.check_end()
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
