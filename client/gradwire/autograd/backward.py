"""Running the local part of a backward: from given tensors to every leaf that they reach."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import GradientEdge, Node

from gradwire.autograd.gradients import elements_of
from gradwire.autograd.graph import ANCHOR, Root, is_leaf_node, leaf_of, nodes_from
from gradwire.autograd.graph_tasks import RUN_MARKER, RUN_MARKER_GRADIENT, BackwardRun, running
from gradwire.torch_internals import engine_run_backward, forward_traceback, storage_id

__all__ = ["backward_into_grad", "backward_to_leaves"]


def backward_to_leaves(
    roots: Sequence[Root],
    gradients: Sequence[torch.Tensor | None],
    run: BackwardRun,
    on_leaf_gradient: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Backpropagates to every leaf and hands over the leaves' gradients; `.grad` is left alone.

    Recv nodes on the way propagate to other peers; it returns when those peers are done, too.
    """
    leaves = [node for node in nodes_from(roots) if is_leaf_node(node)]
    # Gradients of leaves that are not wanted are not computed, and no hook of such a leaf runs.
    wanted = leaves if run.collect_leaves else [node for node in leaves if leaf_of(node) is ANCHOR]
    edges = [*(GradientEdge(node, 0) for node in wanted), RUN_MARKER]
    marked = *roots, RUN_MARKER
    with_marker = *gradients, RUN_MARKER_GRADIENT
    with _checked(run, roots, leaves):
        if run.requester is not None:
            # What torch.autograd.grad comes down to for gradients that are known to fit.
            found = engine_run_backward(
                marked,
                with_marker,
                run.retain_graph,
                run.create_graph,
                tuple(edges),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        else:
            found = torch.autograd.grad(
                marked,  # type: ignore[arg-type] # tensors and edges mix
                edges,
                with_marker,
                retain_graph=run.retain_graph,
                create_graph=run.create_graph,
                allow_unused=True,
            )
    if not run.collect_leaves:
        return
    shared = {_memory(gradient) for gradient in gradients if gradient is not None}
    for node, gradient in zip(wanted, found[:-1], strict=True):
        leaf = leaf_of(node)
        if gradient is not None and leaf is not ANCHOR:
            on_leaf_gradient(leaf, _unshared(gradient.detach(), shared))


def backward_into_grad(
    roots: Sequence[Root], gradients: Sequence[torch.Tensor | None], run: BackwardRun
) -> None:
    """Backpropagates into `.grad`, as a plain backward() does."""
    leaves = [node for node in nodes_from(roots) if is_leaf_node(node)]
    with _checked(run, roots, leaves):
        torch.autograd.backward(
            (*roots, RUN_MARKER),  # type: ignore[arg-type] # tensors and edges mix
            (*gradients, RUN_MARKER_GRADIENT),
            retain_graph=run.retain_graph,
            create_graph=run.create_graph,
        )


@contextmanager
def _checked(run: BackwardRun, roots: Sequence[Root], leaves: Sequence[Node]) -> Iterator[None]:
    """Around a backward: the parameters are those of the forward, and errors say all that is known."""
    try:
        with run.engine.hooks.guard_backward(leaves), running(run):
            run.check_fresh()
            yield
        # Not only before: while the backward waited for other peers, parameters may have been changed.
        run.check_fresh()
    except RuntimeError as error:
        _explain_anomaly(error, roots)
        run.check_fresh()  # torch notices, too, but does not name the parameters
        raise


def _unshared(gradient: torch.Tensor, shared: set[int]) -> torch.Tensor:
    """A gradient with memory of its own: people clip and scale gradients in place.

    torch may give the same tensor as the gradient of several leaves, a view of the gradient that came, or
    a tensor that repeats a single element. It copies such gradients for `.grad`, too.
    """
    memory = _memory(gradient)
    elements = elements_of(gradient)
    if memory in shared or elements.untyped_storage().nbytes() != elements.nbytes:
        return gradient.clone()
    shared.add(memory)
    return gradient


def _memory(tensor: torch.Tensor) -> int:
    return storage_id(elements_of(tensor))


def _explain_anomaly(error: RuntimeError, roots: Sequence[Root]) -> None:
    """With anomaly mode on, torch knows where in the forward the failing function was called.

    torch only prints that as a warning on this machine; the person who reads the error sits at another.
    """
    failed = re.search(r"Function '(\w+)' returned nan values", str(error))
    if failed is None:
        return
    for node in nodes_from(roots):
        lines = forward_traceback(node) if node.name() == failed.group(1) else None
        if lines:
            # Into the message, not a note: notes stay in the process that raises.
            where = f"Traceback of the forward call that caused the error:\n{''.join(lines)}"
            error.args = (f"{error}\n{where}",)
            return
