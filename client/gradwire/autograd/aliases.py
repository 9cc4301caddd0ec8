"""Received tensors that share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.torch_internals import storage_id

__all__ = ["share_history"]


def share_history(tensors: list[torch.Tensor], slots: Sequence[int]) -> None:
    """Makes tensors that share memory views of the same base, so that autograd notices writes to them.

    The tensors are separate outputs of the recv node, so autograd would not know that they share memory.
    torch refuses writes to views that a custom function made, and says to clone. If only one of the tensors
    requires grad, that tensor may be written to, and torch refuses a backward that needs the old value.
    """
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.layout is torch.strided and tensor.is_cpu and tensor.nbytes and not tensor.is_quantized:
            groups.setdefault(storage_id(tensor), []).append(index)
    chosen = set(slots)
    for group in groups.values():
        differentiable = [index for index in group if index in chosen]
        if len(group) < 2 or not differentiable:
            continue
        first = tensors[differentiable[0]]
        storage = first.untyped_storage()
        with torch.no_grad():
            if len(differentiable) == 1:
                base = first.detach()
            else:
                whole = (storage.nbytes() // first.itemsize,)
                base = torch.empty(0, dtype=first.dtype, device="cpu").set_(storage, 0, whole, (1,))
            for index in group:
                tensor = tensors[index]
                if tensor is first and len(differentiable) == 1:
                    continue
                typed = base if tensor.dtype == base.dtype else _typed(base, tensor.dtype)
                tensors[index] = typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _typed(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A view of another dtype: of as much of the storage as has whole elements of both."""
    storage = base.untyped_storage()
    memory = base.as_strided((storage.nbytes() // base.itemsize,), (1,), 0).view(torch.uint8)
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
