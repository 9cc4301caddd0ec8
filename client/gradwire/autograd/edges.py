"""Where a tensor is in the graph, for tensors of any layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["edge_of"]


class _Owner(torch.autograd.Function):
    """forward: tensor -> a token whose node keeps the tensor's node alive. It is never run."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """What `torch.autograd.graph.get_gradient_edge` gives, for sparse tensors, too.

    That function makes a view to hold on to a node which Python defined, or to that of a leaf; sparse tensors
    have no views.
    """
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        owner: Any = _Owner.apply(tensor)  # type: ignore[no-untyped-call]
    ((node, output_nr),) = owner.grad_fn.next_functions
    return GradientEdge(node, output_nr, owner)
