"""Post-accumulate-grad hooks of leaves whose gradients go to a context.

torch runs such a hook when it has added to `.grad`. Gradients of a context are kept outside of `.grad`, and
one backward may reach a leaf in several graph tasks, each with a part of the gradient. So the hooks wait
until the pass is over everywhere, and then run once, with the context's gradient in `.grad`. The peer that
started the pass tells the workers where hooks wait that it is over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.autograd.borrowed_grad import borrowed_grad
from gradwire.autograd.propagating import Propagation, tell_pass_ended
from gradwire.torch_internals import post_accumulate_grad_hooks
from gradwire.wire.ids import AutogradMessageId, ContextId

if TYPE_CHECKING:
    from gradwire.autograd.contexts import DistAutogradContext
    from gradwire.autograd.engine import DistEngine
    from gradwire.transport.base import Link

__all__ = ["WaitingHooks", "run_waiting_hooks"]


@dataclass(slots=True)
class _Waiting:
    """The leaves and the peers that wait for the end of a pass."""

    leaves: dict[ContextId, WeakTensorKeyDictionary] = field(default_factory=dict)
    """Leaves with hooks that got a gradient in the pass, by the context that the gradient went to."""
    links: set[Link] = field(default_factory=set)
    """Links to the peers where hooks wait for the end of the pass, too."""


class WaitingHooks:
    """For each pass, the hooks on this peer that run when the pass is over."""

    def __init__(self) -> None:
        # Reentrant: the destructor of a task ends its pass, at any moment.
        self._lock = threading.RLock()
        self._passes: dict[AutogradMessageId, _Waiting] = {}

    def add_leaf(self, pass_id: AutogradMessageId, context: ContextId, leaf: torch.Tensor) -> None:
        """Notes that a leaf got a gradient in a pass. The hooks of the leaf run when the pass is over."""
        with self._lock:
            waiting = self._passes.setdefault(pass_id, _Waiting())
            waiting.leaves.setdefault(context, WeakTensorKeyDictionary())[leaf] = None

    def add_links(self, pass_id: AutogradMessageId, links: Iterable[Link]) -> None:
        """Notes that hooks on the peers at the other ends of these links wait for the end of a pass."""
        with self._lock:
            self._passes.setdefault(pass_id, _Waiting()).links.update(links)

    def any_waiting(self, pass_id: AutogradMessageId) -> bool:
        """Whether hooks wait for the end of a pass, on this peer or on peers that have to be told by it."""
        return pass_id in self._passes

    def take(self, pass_id: AutogradMessageId) -> _Waiting | None:
        with self._lock:
            return self._passes.pop(pass_id, None)

    def forget(self, peer: int) -> None:
        """Forgets the hooks of the passes of a peer that is gone."""
        with self._lock:
            for id in [id for id in self._passes if id.peer == peer]:
                del self._passes[id]

    def forget_older(self, context: ContextId, number: int) -> None:
        """Forgets the hooks that wait, because of a context, for passes of its owner before a number. Those
        passes failed, so their hooks do not run."""
        if not self._passes:
            return
        with self._lock:
            for id, waiting in tuple(self._passes.items()):
                if id.peer == context.peer and id.number < number and context in waiting.leaves:
                    del waiting.leaves[context]
                    if not waiting.leaves:
                        del self._passes[id]


def run_waiting_hooks(engine: DistEngine, pass_id: AutogradMessageId) -> None:
    """Runs the hooks that waited for the end of a pass, on this peer and, by telling them, on others."""
    waiting = engine.passes.hooks.take(pass_id)
    if waiting is None:
        return
    told: list[Propagation] = []
    try:
        for link in waiting.links:
            told.append(tell_pass_ended(engine.ambient, pass_id, link))
        for id, leaves in waiting.leaves.items():
            context = engine.container.find(id)
            if context is not None:
                for leaf in list(leaves):
                    _run_hooks(leaf, context)
        for propagation in told:
            propagation.wait()
    except BaseException:
        for propagation in told:
            propagation.cancel()
        raise


def _run_hooks(leaf: torch.Tensor, context: DistAutogradContext) -> None:
    """Runs the hooks of a leaf. The hooks find the context's gradient in `.grad`, and may change or
    clear it."""
    with borrowed_grad([leaf]):
        leaf.grad = context.take_gradient(leaf)
        try:
            for hook in list((post_accumulate_grad_hooks(leaf) or {}).values()):
                with torch.no_grad():
                    hook(leaf)
        finally:
            if leaf.grad is not None:
                context.accumulate(leaf, leaf.grad)
