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
    from gradwire.autograd.kept_state.gathering import Gathering
    from gradwire.autograd.kept_state.remote_segments import RemoteGraphSegment, ResultGroup
    from gradwire.autograd.propagating import Propagation
    from gradwire.autograd.releases import PeerReleases

__all__ = ["GradientsToReturn", "ReceivedTensors", "SentArguments", "SentResults"]


class SentArguments:
    """Arguments that this peer sent, and the gradients for them that wait for their send node to run."""

    def __init__(
        self,
        id: AutogradMessageId,
        context: ContextId,
        tensors: Sequence[torch.Tensor],
        peer: int,
        check_fresh: Callable[[], None] | None = None,
    ) -> None:
        self.id = id
        self.context = context
        self.peer = peer
        """The peer that the arguments went to."""
        self.check_fresh = check_fresh
        """For results of a call that was served here, see `SentResults`."""
        self.metadata = [TensorMetadata.of(tensor) for tensor in tensors]
        self.token: torch.Tensor | None = None
        """The output of the send node. An edge to it means: depends on these arguments."""
        self.group: ResultGroup | None = None
        """Kept state: the group of the results that depend on these arguments."""
        self.segments: weakref.WeakSet[RemoteGraphSegment] | None = None
        """Kept state: the remote segments that lead to these arguments."""
        self.is_released = False
        """Whether nothing at the receiver refers to them any more, so that no contributions can come."""
        # Reentrant: the destructor of a graph task's state may run at any moment, within these very methods.
        self._lock = threading.RLock()
        self._awaiting: dict[int, list[Propagation | Gathering]] = {}
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

    def await_contributions(self, task: int, *of: Propagation | Gathering) -> None:
        """Has the send node of a graph task wait for responses, which may bring gradients."""
        with self._lock:
            self._awaiting.setdefault(task, []).extend(of)

    def awaited_in(self, task: int) -> list[Propagation | Gathering]:
        """The requests whose responses may bring gradients for a graph task."""
        with self._lock:
            return list(self._awaiting.get(task, ()))

    def awaiting_tasks(self) -> list[int]:
        with self._lock:
            return list(self._awaiting)

    def put(self, task: int, gradients: Gradients) -> bool:
        """Adds gradients that came for a graph task. Returns False if the task does not await any."""
        with self._lock:
            if task not in self._awaiting:
                return False
            add_gradients(self._pending_gradients.setdefault(task, [None] * self.arity), gradients)
            return True

    def collect(self, task: int) -> Gradients:
        """Waits for all responses that may bring gradients for a graph task, and takes the sum."""
        # Not a copy: before it waits, a gathering may send gradients that bring more to wait for.
        for awaited in self._awaiting.get(task, ()):
            awaited.wait()
        gradients = self.forget(task)
        if self.check_fresh is not None and any(gradient is not None for gradient in gradients):
            self.check_fresh()
        return gradients

    def forget(self, task: int) -> Gradients:
        """Takes the sum of the gradients that came for a graph task. The task will not collect again."""
        with self._lock:
            self._awaiting.pop(task, None)
            return self._pending_gradients.pop(task, [None] * self.arity)


class SentResults:
    """Results that this peer sent. A backward that their receiver requests starts from them."""

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
        """The peer that the results went to."""
        # Keeps the graph alive until the receiver releases it. Edges and not tensors:
        # a function may keep a tensor and modify it in place later, which moves the tensor in the graph.
        self.edges: list[GradientEdge | None] = [edge_of(tensor) for tensor in tensors]
        self.metadata = [TensorMetadata.of(tensor) for tensor in tensors]
        self.bytes = sum(map(nbytes, tensors))
        self.check_fresh = check_fresh
        """Raises if the parameters are no longer those of the forward."""
        self.as_arguments: SentArguments | None = None
        """Kept state: has a send node that brings their gradients into a backward that waited for them."""


class ReceivedTensors:
    """Tensors that came from another peer, and where their gradients are sent.

    This record lives as long as the recv node. When the node is freed, the message is released at the sender.
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
        metadata: Sequence[TensorMetadata],
        compression: autograd_pb2.Compression | None = None,
        depends_on: Sequence[SentArguments] = (),
        foreign: Sequence[AutogradMessageId] = (),
    ) -> None:
        self.engine = engine
        self.source = source
        self.context = context
        self.link = link
        self.are_arguments = are_arguments
        self.what = what
        """Names the tensors in errors, such as the results of a call."""
        self.metadata = metadata
        self.compression = compression
        """How the gradients of the tensors are compressed."""
        self.depends_on = depends_on
        """Arguments that this peer sent, which the tensors depend on."""
        self.foreign = foreign
        """Messages of third peers, which the tensors depend on."""
        self.segment: RemoteGraphSegment | None = None
        """Kept state: the part of the sender's graph that the tensors lead into, if others may do so. They
        depend on all arguments behind it."""
        self.node: weakref.ref[Any] | None = None
        """The recv node."""
        self.is_live = False
        """Whether `DistEngine.live` has the message."""
        self._freed: set[int] = set()
        """The slots of tensors whose graph was freed by a backward."""
        self._releases = releases

    def is_known_to(self, peer: int) -> bool:
        """Whether a peer can itself find what these tensors depend on.

        A peer can do so for arguments that it sent, since their send node is in its graph. Results are never
        named to the peer that sent them.
        """
        return self.are_arguments and self.source.peer == peer

    def mark_freed(self, gradients: Gradients, *, for_good: bool) -> None:
        """A backward comes through some of the tensors: for good, if the graph is not retained.

        Each of several results may have a backward of its own. A second backward through a freed graph
        raises the error that torch raises.
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
        return len(self._freed) == len(self.metadata)

    def mark_released(self) -> None:
        """Notes that the sender keeps the message no longer, so that it need not be released."""
        self._releases = None

    def __del__(self) -> None:
        # Runs at any moment and in any thread, so it must not take a lock.
        if self.is_live:
            self.engine.live.discard(self.source)
        if self._releases is not None:
            self._releases.append(self.source)


GradientsToReturn = tuple[ReceivedTensors, Gradients]
"""Gradients of tensors that came, on their way to the peer that sent them."""
