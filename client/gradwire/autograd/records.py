"""What a node remembers of tensors that crossed to or from another one.

Sending arguments leaves a `SentArguments` here and a `ReceivedTensors` there; sending results leaves a
`SentResults` there and a `ReceivedTensors` here. Gradients flow from ReceivedTensors to Sent.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge

from gradwire.autograd.edges import edge_of
from gradwire.proto.v1 import autograd_pb2
from gradwire.transport.base import Link, Payload
from gradwire.wire.ids import AutogradMessageId, ContextId

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine
    from gradwire.autograd.groups import Group, Reach
    from gradwire.autograd.propagating import Propagation
    from gradwire.autograd.regions import Name

__all__ = [
    "Gradients",
    "ReceivedTensors",
    "Releases",
    "SentArguments",
    "SentResults",
    "add_gradients",
    "added",
    "elements_of",
    "nbytes",
]

Gradients = Sequence[torch.Tensor | None]
"""A gradient, or none, for each tensor of a message that requires grad."""


def added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum. Never in place: gradients may share memory with one another."""
    # torch adds a sparse tensor to a dense one, but not the other way round.
    return other + one if one.layout is not torch.strided else one + other


def add_gradients(total: list[torch.Tensor | None], more: Gradients) -> None:
    """Adds to a running sum."""
    for slot, gradient in enumerate(more):
        if gradient is not None:
            so_far = total[slot]
            total[slot] = gradient if so_far is None else added(so_far, gradient)


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor; of a sparse one, those that it has."""
    if tensor.layout is torch.strided:
        return tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def nbytes(tensor: torch.Tensor) -> int:
    """The memory of a tensor's elements."""
    return elements_of(tensor).nbytes


class SentArguments:
    """Arguments that this node sent: a mailbox for the gradients that come back."""

    def __init__(
        self, id: AutogradMessageId, context: ContextId, tensors: Sequence[torch.Tensor], peer: int
    ) -> None:
        self.id = id
        self.context = context
        self.peer = peer
        """The node that they went to."""
        self.like = [(tensor.shape, tensor.device, tensor.is_complex()) for tensor in tensors]
        self.token: torch.Tensor | None = None
        """The output of the send node. An edge to it means: depends on these arguments."""
        self.group: Group | None = None
        """Of the results that reach them."""
        # Reentrant: the destructor of a task may run at any moment, within these very methods.
        self._lock = threading.RLock()
        self._awaiting: dict[int, list[Propagation]] = {}
        self._mail: dict[int, list[torch.Tensor | None]] = {}

    @property
    def arity(self) -> int:
        return len(self.like)

    @property
    def edges(self) -> list[GradientEdge | None]:
        """Where each of the tensors was in the graph when it was sent."""
        send = None if self.token is None else self.token.grad_fn
        if send is None:
            return [None] * self.arity
        return [None if node is None else GradientEdge(node, slot) for node, slot in send.next_functions]

    def await_response(self, task: int, propagation: Propagation | None = None) -> None:
        """There may be mail for a graph task; its send node must not run before that response is in."""
        with self._lock:
            awaited = self._awaiting.setdefault(task, [])
            if propagation is not None:
                awaited.append(propagation)

    def awaited_in(self, task: int) -> list[Propagation]:
        """The responses that may bring mail for a graph task."""
        with self._lock:
            return list(self._awaiting.get(task, ()))

    def awaiting_tasks(self) -> list[int]:
        with self._lock:
            return list(self._awaiting)

    def put(self, task: int, gradients: Gradients) -> bool:
        """Mail for a graph task. False if the task does not await any."""
        with self._lock:
            if task not in self._awaiting:
                return False
            add_gradients(self._mail.setdefault(task, [None] * self.arity), gradients)
            return True

    def collect(self, task: int) -> Gradients:
        """Waits for the responses that may bring mail for a graph task, and takes the mail."""
        for propagation in self.awaited_in(task):
            propagation.wait()
        return self.forget(task)

    def forget(self, task: int) -> Gradients:
        """Takes what has come for a graph task, which will ask no more."""
        with self._lock:
            self._awaiting.pop(task, None)
            return self._mail.pop(task, [None] * self.arity)


class SentResults:
    """Results that this node sent: where a backward that comes back starts."""

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
        """The node that they went to."""
        # Keeps the graph alive until the receiver releases it. Not the tensors: a function that keeps one
        # may modify it in place later, and then the tensor is somewhere else in the graph.
        self.edges: list[GradientEdge | None] = [edge_of(tensor) for tensor in tensors]
        self.like = [(tensor.shape, tensor.device, tensor.is_complex()) for tensor in tensors]
        self.bytes = sum(map(nbytes, tensors))
        self.check_fresh = check_fresh
        """Raises if the parameters are no longer those of the forward."""
        self.gate: torch.Tensor | None = None
        """The output of the gate node, if a run can be held open for them."""


class _NameReference(weakref.ref["Name"]):
    """To a name that another node knows. Called back when nothing has the name any more."""

    __slots__ = ("id",)
    id: AutogradMessageId


class Releases:
    """Messages of one other node that nothing here refers to any more, to be told to it.

    They ride on the next message that goes there. `append` and what `on_discarded` returns are called by
    destructors, at any moment and in any thread, so they do nothing but append.
    """

    def __init__(self) -> None:
        self._waiting: deque[AutogradMessageId | _NameReference] = deque()
        self._names: dict[AutogradMessageId, _NameReference] = {}
        self._discarded: deque[tuple[type[Any], bytes]] = deque()
        self._learned: deque[AutogradMessageId] = deque()
        self.append = self._waiting.append
        self.append_learned = self._learned.append
        """For results that came and that later ones may build on."""

    def on_discarded(self, kind: type[Any]) -> Callable[[Payload], None]:
        """For responses of a kind that came, and that nobody looks into."""
        return lambda response: self._discarded.append((kind, response.body))

    def take_discarded(self) -> list[tuple[type[Any], bytes]]:
        taken = []
        while self._discarded:
            taken.append(self._discarded.popleft())
        return taken

    def take(self) -> list[AutogradMessageId]:
        if not self._waiting:
            return []
        return [
            self._forgotten(one) if isinstance(one, _NameReference) else one for one in _taken(self._waiting)
        ]

    def take_learned(self) -> list[AutogradMessageId]:
        return _taken(self._learned) if self._learned else []

    def offer(self, name: Name) -> None:
        """The other node is told of a name, and is to be told when nothing here has it any more."""
        # Not by a method: it would be called where graphs are destroyed, in the middle of C++ code that an
        # interpreter which shuts down must not leave.
        reference = self._names[name.id] = _NameReference(name, self._waiting.append)
        reference.id = name.id

    def confirm(self, ids: Iterable[AutogradMessageId]) -> None:
        """The other node knows names."""
        for id in ids:
            name = self._names[id]() if id in self._names else None
            if name is not None:
                name.is_known = True

    def _forgotten(self, reference: _NameReference) -> AutogradMessageId:
        self._names.pop(reference.id, None)
        return reference.id


_Item = TypeVar("_Item")


def _taken(waiting: deque[_Item], at_most: int = 1000) -> list[_Item]:
    """So many at most that the message does not grow by much."""
    taken: list[_Item] = []
    while len(taken) < at_most:
        try:
            taken.append(waiting.popleft())
        except IndexError:
            break
    return taken


class ReceivedTensors:
    """Tensors that came from another node: where their gradients go.

    Lives as long as the recv node does. When that goes, the sender may let go, too.
    """

    def __init__(
        self,
        engine: DistEngine,
        source: AutogradMessageId,
        context: ContextId,
        *,
        link: Link | None,
        releases: Releases | None,
        are_arguments: bool,
        what: str,
        arity: int,
        compression: autograd_pb2.Compression | None = None,
        depends_on: Sequence[SentArguments] = (),
        foreign: Sequence[AutogradMessageId] = (),
        builds_on: Sequence[Reach] = (),
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
        """Arguments that this node sent, which the tensors reach."""
        self.foreign = foreign
        """Messages of third nodes, which the tensors reach."""
        self.builds_on = builds_on
        """Earlier results whose graph the tensors lead into: they reach what those reach, too."""
        self.group: Group | None = None
        """Results with which these may have parts of a graph in common."""
        self.node: weakref.ref[Any] | None = None
        """The recv node."""
        self.is_live = False
        """Whether it is among the engine's live messages."""
        self._spent: set[int] = set()
        self._releases = releases

    def is_known_to(self, peer: int) -> bool:
        """Whether a peer knows what is behind these tensors, once it is told that they are reached.

        It does of arguments that it sent: they have a send node in its graph. Of results that it sent it is
        never told that they are reached.
        """
        return self.are_arguments and self.source.peer == peer

    def may_share(self, other: SentArguments | Reach) -> bool:
        """Whether arguments, or earlier results, are of the same worker and the same context."""
        return other.peer == self.source.peer and other.context == self.context

    def spend(self, gradients: Gradients, *, for_good: bool) -> None:
        """Backward comes through some of the tensors: for good, if the graph is not retained.

        Each of several results may have a backward of its own. One that was spent raises what torch raises.
        """
        slots = {slot for slot, gradient in enumerate(gradients) if gradient is not None}
        if slots & self._spent:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after "
                f"they have already been freed): {self.what}. Specify retain_graph=True if you need to "
                "backward through the graph a second time."
            )
        if for_good:
            self._spent |= slots

    @property
    def is_spent(self) -> bool:
        """Whether no backward can come through any of the tensors any more."""
        return len(self._spent) == self.arity

    def released(self) -> None:
        """The sender has let go already."""
        self._releases = None

    def __del__(self) -> None:
        # At any moment and in any thread, so only what needs no lock.
        if self.is_live:
            self.engine.live.discard(self.source)
        if self._releases is not None:
            self._releases.append(self.source)
