"""One peer's part in backward passes that cross processes: what its other modules share.

`messages` records what crosses in a call, `send_recv` puts it into the graph, `propagating` and `serving` are
the two ends of PropagateGradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gradwire import wire
from gradwire.autograd.contexts import DistAutogradContainer
from gradwire.autograd.engine_hooks import EngineHooks
from gradwire.autograd.feedback import ErrorFeedback
from gradwire.autograd.kept_state.graph_segments import GraphSegments
from gradwire.autograd.leases import ContextLeases
from gradwire.autograd.passes import Passes, new_id
from gradwire.autograd.records import ReceivedTensors
from gradwire.autograd.releases import Releases
from gradwire.errors import WorkerLost
from gradwire.torch_internals import post_accumulate_grad_hooks
from gradwire.transport.base import Link
from gradwire.wire.ids import AutogradMessageId, ContextId

if TYPE_CHECKING:
    from gradwire.autograd.graph_tasks import BackwardRun

__all__ = ["DistEngine"]


class DistEngine:
    """The distributed autograd of one peer. PyTorch's own engine runs all graphs."""

    def __init__(self, peer: int, find_link: Callable[[int], Link | None]) -> None:
        self.peer = peer
        self.ambient = ContextId.new(peer, 0)
        """The context of what this peer does outside of any other."""
        self.limits = wire.Limits()
        """On what comes without a link, as unary calls do."""
        self.container = DistAutogradContainer()
        self.feedback = ErrorFeedback()
        self.passes = Passes(peer)
        self.releases = Releases(self.container)
        self.leases = ContextLeases(peer, self.container, find_link)
        self.graph_segments = GraphSegments(peer)
        self.suspended = self.container.suspended
        self.live: set[AutogradMessageId] = set()
        """Received messages that later sends may depend on: arguments, and results that depend on a third
        peer. While it is empty, nothing that is sent needs `depends_on`."""
        self._find_link = find_link
        self.attach(EngineHooks())

    def attach(self, hooks: EngineHooks) -> None:
        """Replaces the hooks: by those of a worker, or by `EngineHooks()` when the worker stops."""
        self.hooks = hooks
        self.container.hooks = hooks

    def new_id(self) -> AutogradMessageId:
        return new_id(self.peer)

    def oldest_pass(self, context: ContextId) -> int:
        """The number of the oldest unfinished pass of a context's owner; 0 if none is known."""
        return self.passes.oldest if context.peer == self.peer else self.container.oldest_pass(context)

    def learn_oldest_pass(self, context: ContextId, number: int) -> None:
        """Notes the number of the oldest unfinished pass of a context's owner, as a call in it brought it.

        It counts in this context alone: any client may make up a context in the name of another one.
        """
        if context.peer != self.peer and self.container.learn_oldest_pass(context, number):
            self.passes.hooks.forget_older(context, number)

    def is_over(self, pass_id: AutogradMessageId, context: ContextId) -> bool:
        """Whether a pass, which reaches this peer in a context, has ended."""
        if pass_id.peer == self.peer:
            return pass_id.number < self.passes.oldest
        return pass_id.peer == context.peer and pass_id.number < self.container.oldest_pass(context)

    def accumulate(
        self, run: BackwardRun, into: ContextId, leaf: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        """Adds the gradient of a leaf of this process to a context."""
        context = self.container.get(into)
        # What still runs of a backward that failed no longer counts once its caller has gone on.
        is_added = context.accumulate(leaf, gradient, unless=run.is_over)
        if is_added and post_accumulate_grad_hooks(leaf):
            self.passes.hooks.add_leaf(run.pass_id, into, leaf)

    def link_to(self, received: ReceivedTensors) -> Link:
        """The link to the peer that tensors came from."""
        link = received.link
        if link is None or link.ended is not None:
            link = self._find_link(received.source.peer) or link
        if link is None:
            raise WorkerLost(
                f"the gradients for {received.what} cannot be delivered: its caller has no link to this peer"
            )
        return link

    def forget_client(self, client: int, *, is_gone: bool) -> None:
        """A client has no link to this peer any more. `is_gone` is False if only the link was closed: the
        client may still take part through other peers."""
        self.passes.hooks.forget(client)
        self.feedback.forget(client)
        self.leases.drop_client(client, is_gone=is_gone)

    def close(self) -> None:
        self.leases.close()
        for suspended in list(self.suspended.values()):
            suspended.give_up("the peer is shut down")
