"""PyTorch's graph: where a tensor is in it, what is reached from there, and the tokens that gradwire puts
into it.

A token is a scalar that carries no data. An edge to a node that gives a token means: depends on that node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gradwire.torch_internals import apply_function, will_engine_execute_node

__all__ = [
    "ANCHOR",
    "TOKEN",
    "Root",
    "apply",
    "edge_of",
    "is_leaf_node",
    "leaf_of",
    "nodes_from",
    "wants_all_leaves",
]

Root = torch.Tensor | GradientEdge

# Not memory of torch's own allocator, which reads its settings when it is first asked for memory:
# `tune_malloc` would come too late.
ANCHOR = torch.frombuffer(bytearray(4), dtype=torch.float32)[0].requires_grad_()
"""A private leaf below every recv node, so that the tensors which arrive can require grad even if none that
was sent does. No gradient ever flows into it."""

TOKEN = torch.frombuffer(bytearray(4), dtype=torch.float32)[0]
"""The data of all tokens and of their gradients: nobody reads or writes it. On the CPU, so that a send node
waits on the thread that called backward and never on a GPU's thread, which all passes share."""

_ANCHOR_NODE = get_gradient_edge(ANCHOR).node  # kept: a leaf holds its node only weakly
_LEAF_NODE = type(_ANCHOR_NODE)


def wants_all_leaves() -> bool:
    """Whether the graph task that runs now is a plain backward(), not torch.autograd.grad or
    backward(inputs=...)."""
    return will_engine_execute_node(_ANCHOR_NODE)


def is_leaf_node(node: object) -> bool:
    """Whether a node is the end of the graph at a leaf tensor."""
    return isinstance(node, _LEAF_NODE)


def leaf_of(leaf_node: Node) -> torch.Tensor:
    """The leaf tensor that a node accumulates into."""
    variable: torch.Tensor = leaf_node.variable  # type: ignore[attr-defined]
    return variable


apply = apply_function  # tensors that torch.func has wrapped do not travel


class _Owner(torch.autograd.Function):
    """forward: tensor -> a token whose node keeps the tensor's node alive. It is never run."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """The same as `torch.autograd.graph.get_gradient_edge`, for sparse tensors, too.

    torch's function makes a view to keep alive the node of a leaf, or a node that Python defined. Sparse
    tensors have no views.
    """
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        owner: Any = _Owner.apply(tensor)  # type: ignore[no-untyped-call]
    ((node, output_nr),) = owner.grad_fn.next_functions
    return GradientEdge(node, output_nr, owner)


def nodes_from(roots: Sequence[Root]) -> Iterator[Node]:
    """Every node that is reached from the roots, once."""
    starts = [root.node if isinstance(root, GradientEdge) else edge_of(root).node for root in roots]
    seen = dict.fromkeys(starts)
    stack = list(seen)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen[following] = None
                stack.append(following)
