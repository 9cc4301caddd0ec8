"""What a peer remembers of tensors that crossed to or from another peer.

Sending arguments leaves a `SentArguments` at the sender and a `ReceivedTensors` at the receiver; sending
results leaves a `SentResults` and a `ReceivedTensors`. Gradients flow from the receiver to the sender.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from gradwire.autograd.gradients import Gradients, TensorMetadata, add_gradients, nbytes
from gradwire.autograd.graph import edge_of
from gradwire.proto.v1 import autograd_pb2
from gradwire.transport.base import Link
from gradwire.wire.ids import AutogradMessageId, ContextId

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine
    from gradwire.autograd.kept_state.remote_segments import RemoteGraphSegment, ResultGroup
    from gradwire.autograd.propagating import Propagation
    from gradwire.autograd.releases import PeerReleases

__all__ = ["ReceivedTensors", "SentArguments", "SentResults"]


class SentArguments:
    """Arguments that this peer sent, and the gradients for them that wait for their send node to run."""

    def __init__(
        self, id: AutogradMessageId, context: ContextId, tensors: Sequence[torch.Tensor], peer: int
    ) -> None:
        self.id = id
        self.context = context
        self.peer = peer
        """The peer that they went to."""
        self.metadata = [TensorMetadata.of(tensor) for tensor in tensors]
        self.token: torch.Tensor | None = None
        """The output of the send node. An edge to it means: depends on these arguments."""
        self.group: ResultGroup | None = None
        """Of the results that depend on them, if those have a graph in common."""
        # Reentrant: the destructor of a graph task's state may run at any moment, within these very methods.
        self._lock = threading.RLock()
        self._awaiting: dict[int, list[Propagation]] = {}
        """For each graph task that awaits gradients: the requests whose responses may bring some."""
        self._pending_gradients: dict[int, list[torch.Tensor | None]] = {}
        """For each graph task: the sum of the gradients that have come."""

    @property
    def arity(self) -> int:
        return len(self.metadata)

    @property
    def edges(self) -> list[GradientEdge | None]:
        """Where each of the tensors was in the graph when it was sent."""
        send = None if self.token is None else self.token.grad_fn
        if send is None:
            return [None] * self.arity
        return [None if node is None else GradientEdge(node, slot) for node, slot in send.next_functions]

    def await_response(self, task: int, propagation: Propagation | None = None) -> None:
        """Gradients may come for a graph task; its send node must not run before that response is in."""
        with self._lock:
            awaited = self._awaiting.setdefault(task, [])
            if propagation is not None:
                awaited.append(propagation)

    def awaited_in(self, task: int) -> list[Propagation]:
        """The requests whose responses may bring gradients for a graph task."""
        with self._lock:
            return list(self._awaiting.get(task, ()))

    def awaiting_tasks(self) -> list[int]:
        with self._lock:
            return list(self._awaiting)

    def put(self, task: int, gradients: Gradients) -> bool:
        """Gradients have come for a graph task. False if the task does not await any."""
        with self._lock:
            if task not in self._awaiting:
                return False
            add_gradients(self._pending_gradients.setdefault(task, [None] * self.arity), gradients)
            return True

    def collect(self, task: int) -> Gradients:
        """Waits for all responses that may bring gradients for a graph task, and takes the sum."""
        for propagation in self.awaited_in(task):
            propagation.wait()
        return self.forget(task)

    def forget(self, task: int) -> Gradients:
        """Takes the sum of what has come for a graph task, which will collect no more."""
        with self._lock:
            self._awaiting.pop(task, None)
            return self._pending_gradients.pop(task, [None] * self.arity)


class SentResults:
    """Results that this peer sent: where a backward starts that the receiver requests."""

    def __init__(
        self,
        id: AutogradMessageId,
        context: ContextId,
        tensors: Sequence[torch.Tensor],
        function: str,
        peer: int,
        check_fresh: Callable[[], None] | None = None,
    ) -> None:
        self.id = id
        self.context = context
        self.function = function
        self.peer = peer
        """The peer that they went to."""
        # Keeps the graph alive until the receiver releases it. Not the tensors: a function that keeps one
        # may modify it in place later, and then the tensor is somewhere else in the graph.
        self.edges: list[GradientEdge | None] = [edge_of(tensor) for tensor in tensors]
        self.metadata = [TensorMetadata.of(tensor) for tensor in tensors]
        self.bytes = sum(map(nbytes, tensors))
        self.check_fresh = check_fresh
        """Raises if the parameters are no longer those of the forward."""
        self.injector: torch.Tensor | None = None
        """The token of the gradient injector, if a backward can be suspended until their gradients come."""


class ReceivedTensors:
    """Tensors that came from another peer: where their gradients go.

    Lives as long as the recv node does. When that goes, the sender may let go, too.
    """

    def __init__(
        self,
        engine: DistEngine,
        source: AutogradMessageId,
        context: ContextId,
        *,
        link: Link | None,
        releases: PeerReleases | None,
        are_arguments: bool,
        what: str,
        arity: int,
        compression: autograd_pb2.Compression | None = None,
        depends_on: Sequence[SentArguments] = (),
        foreign: Sequence[AutogradMessageId] = (),
        builds_on: Sequence[RemoteGraphSegment] = (),
    ) -> None:
        self.engine = engine
        self.source = source
        self.context = context
        self.link = link
        self.are_arguments = are_arguments
        self.what = what
        """For people: which call's arguments or results."""
        self.arity = arity
        self.compression = compression
        """How the gradients travel."""
        self.depends_on = depends_on
        """Arguments that this peer sent, which the tensors depend on."""
        self.foreign = foreign
        """Messages of third peers, which the tensors depend on."""
        self.builds_on = builds_on
        """Parts of the sender's graph that the tensors lead into: they depend on what those depend on,
        too."""
        self.group: ResultGroup | None = None
        """Results with which these may have parts of the sender's graph in common."""
        self.node: weakref.ref[Any] | None = None
        """The recv node."""
        self.is_live = False
        """Whether it is among the engine's live messages."""
        self._freed: set[int] = set()
        """The slots of tensors whose graph was freed by a backward."""
        self._releases = releases

    def is_known_to(self, peer: int) -> bool:
        """Whether a peer can itself find what these tensors depend on.

        It can for arguments that it sent: their send node is in its graph. Results are never named to the
        peer that sent them.
        """
        return self.are_arguments and self.source.peer == peer

    def mark_freed(self, gradients: Gradients, *, for_good: bool) -> None:
        """A backward comes through some of the tensors: for good, if the graph is not retained.

        Each of several results may have a backward of its own. A second one through a freed graph raises what
        torch raises.
        """
        slots = {slot for slot, gradient in enumerate(gradients) if gradient is not None}
        if slots & self._freed:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after "
                f"they have already been freed): {self.what}. Specify retain_graph=True if you need to "
                "backward through the graph a second time."
            )
        if for_good:
            self._freed |= slots

    @property
    def is_freed(self) -> bool:
        """Whether no backward can come through any of the tensors any more."""
        return len(self._freed) == self.arity

    def mark_released(self) -> None:
        """The sender has let go already."""
        self._releases = None

    def __del__(self) -> None:
        # At any moment and in any thread, so only what needs no lock.
        if self.is_live:
            self.engine.live.discard(self.source)
        if self._releases is not None:
            self._releases.append(self.source)
