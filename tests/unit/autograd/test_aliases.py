"""Tensors that share memory at the sender share it, and the count of writes to it, at the receiver."""

from __future__ import annotations

import pytest
import torch

from gradwire.autograd.aliases import share_history


def over(tensor: torch.Tensor, dtype: torch.dtype, count: int) -> torch.Tensor:
    """The first elements of a dtype in the same memory."""
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), 0, (count,), (1,))


@pytest.mark.parametrize(
    ("tensor", "dtype", "count"),
    [
        (torch.arange(3.0), torch.int64, 1),  # 12 bytes are no whole number of them
        (torch.arange(6.0).reshape(2, 3).t(), torch.int32, 6),
        (torch.arange(6.0)[::2], torch.int8, 24),
        (torch.arange(1.0), torch.complex64, 0),
    ],
)
@pytest.mark.parametrize("slots", [[0], [0, 1]])
def test_tensors_of_different_dtypes_share_their_memory(
    tensor: torch.Tensor, dtype: torch.dtype, count: int, slots: list[int]
) -> None:
    other = over(tensor, dtype, count)
    bits = other.clone()
    tensors = [tensor, tensor.detach(), other]
    share_history(tensors, slots)
    assert torch.equal(tensors[2], bits)
    if count:
        before = tensors[0]._version
        tensors[2].zero_()
        assert tensors[0]._version == before + 1
        assert tensors[0].flatten()[0] == 0.0
