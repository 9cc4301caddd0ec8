"""One graph task of PyTorch's engine: what it has requested of other peers, and what it waits for.

`backward()` on this peer is one graph task; so is each backward that another peer requests. A pass is all the
graph tasks, on all peers, that one backward() sets off.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from gradwire.autograd.gradients import Gradients
from gradwire.autograd.graph import edge_of, wants_all_leaves
from gradwire.autograd.hooks import run_waiting_hooks
from gradwire.autograd.kept_state.gathering import Gathering
from gradwire.autograd.kept_state.remote_segments import ResultGroup, arguments_behind
from gradwire.autograd.propagating import GradientsToSend, Propagation, send_gradients
from gradwire.autograd.records import GradientsToReturn, ReceivedTensors, SentArguments
from gradwire.torch_internals import (
    current_graph_task_id,
    graph_task_keeps_graph,
    is_stashed,
    queue_callback,
    stash,
    stashed,
    unstash,
    will_engine_execute_node,
)
from gradwire.wire.ids import AutogradMessageId, ContextId

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine
    from gradwire.transport.base import Link

__all__ = [
    "RUN_MARKER",
    "RUN_MARKER_GRADIENT",
    "BackwardRun",
    "GraphTaskState",
    "current_run",
    "current_task",
    "find_task",
    "running",
]

_RUN_KEY = "gradwire.run"


@dataclass(slots=True)
class BackwardRun:
    """A backward that gradwire itself started: because another peer requested it, or for a context."""

    engine: DistEngine
    pass_id: AutogradMessageId
    context: ContextId
    """That of the forward."""
    requester: int | None
    """The peer that requested it. Contributions to its messages go into the response."""
    collect_leaves: bool
    collect_into: ContextId | None
    create_graph: bool = False
    retain_graph: bool = True
    """If another peer requested it, the graph is kept until that peer lets go of it."""
    contributions: list[GradientsToReturn] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    """Of the results that it starts from: each raises if parameters are no longer those of the forward."""

    def is_over(self) -> bool:
        """Whether it no longer counts: its pass has failed or was given up."""
        return self.engine.is_over(self.pass_id, self.context)

    def check_fresh(self) -> None:
        for check in self.checks:
            check()

    def responds_with(self, received: ReceivedTensors) -> bool:
        """Whether gradients for a message go into the response: the requester goes on from there."""
        return received.are_arguments and received.source.peer == self.requester

    def contribute(self, received: ReceivedTensors, gradients: Gradients) -> None:
        received.mark_freed(gradients, for_good=not self.retain_graph)
        self.contributions.append((received, gradients))


class _RunMarker(torch.autograd.Function):
    """Does nothing."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None


_MARKED = torch.frombuffer(bytearray(4), dtype=torch.float32)
RUN_MARKER = edge_of(_RunMarker.apply(_MARKED.detach().requires_grad_()))  # type: ignore[no-untyped-call]
"""Among the roots of every graph task of a run, and of no other graph task."""
RUN_MARKER_GRADIENT = _MARKED


class running:
    """Tells the graph's nodes that run inside a block about a run: torch carries it to the engine's
    threads."""

    __slots__ = ("_before", "_run")

    def __init__(self, run: BackwardRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._before = stashed(_RUN_KEY) if is_stashed(_RUN_KEY) else None
        stash(_RUN_KEY, self._run)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            unstash(_RUN_KEY)
        else:
            stash(_RUN_KEY, self._before)


def current_run() -> BackwardRun | None:
    """The run whose graph task runs now.

    torch passes the stashed run on to graph tasks that code starts during backward. Those do not belong to
    the run. A graph task belongs to it only if RUN_MARKER is among its nodes.
    """
    if not is_stashed(_RUN_KEY) or not will_engine_execute_node(RUN_MARKER.node):
        return None
    run: BackwardRun | None = stashed(_RUN_KEY)
    return run


class GraphTaskState:
    """One graph task. Kept alive by the callback that the engine runs at its end.

    Use it as ``with task:``. If the block raises, the task is abandoned at once: its destructor could come
    too late, because the traceback keeps it alive.
    """

    def __init__(self, id: int, run: BackwardRun | None) -> None:
        self.id = id
        self.run = run
        self.collect_leaves = run.collect_leaves if run is not None else wants_all_leaves()
        self.create_graph = torch.is_grad_enabled()
        self.retain_graph = run.retain_graph if run is not None else graph_task_keeps_graph()
        self._pass_id = run.pass_id if run is not None else None
        self._started_at: DistEngine | None = None
        """The peer's engine that started the pass, if it started with this very graph task."""
        self.awaited: dict[AutogradMessageId, SentArguments] = {}
        """Arguments for which responses may bring gradients."""
        self.awaiting_end: set[Link] = set()
        """To peers where hooks wait for the end of the pass."""
        self._sent: list[Propagation] = []
        self._gatherings: dict[ResultGroup, Gathering] = {}
        self._finished = False

    def pass_id(self, engine: DistEngine) -> AutogradMessageId:
        if self._pass_id is None:
            self._pass_id = engine.passes.start()
            self._started_at = engine
        return self._pass_id

    def is_in_pass(self, pass_id: AutogradMessageId) -> bool:
        return self._pass_id == pass_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not None:
            self.abandon()

    def send_or_gather(self, received: ReceivedTensors, gradients: Gradients | None) -> None:
        """Sends gradients to the peer that tensors came from, without waiting, or gathers them first (kept
        state). None if the recv node ran without a gradient: others may wait for it."""
        if gradients is not None:
            received.mark_freed(gradients, for_good=not self.retain_graph)
        if received.segment is not None and not self.create_graph:
            group = received.segment.group
            if group not in self._gatherings:
                self._gatherings[group] = Gathering(self, group, received)
            self._gatherings[group].add(received, gradients)
        elif gradients is not None:
            self.send_alone(received, gradients)

    def send_alone(self, received: ReceivedTensors, gradients: Gradients) -> None:
        """Sends the gradients of one message, for a run of their own."""
        self.send(GradientsToSend([(received, gradients)]), arguments_behind(received, set()))

    def send(self, to_send: GradientsToSend, awaiting: Sequence[SentArguments] = ()) -> Propagation:
        """Sends gradients in one request, without waiting. The response may bring contributions to arguments
        in `awaiting`."""
        propagation = send_gradients(to_send, self, partial(self.await_contributions, awaiting))
        self._sent.append(propagation)
        return propagation

    def await_contributions(self, arguments: Sequence[SentArguments], *of: Propagation | Gathering) -> None:
        """Contributions to arguments may come: their send nodes must not run before those are there."""
        for sent in arguments:
            self.awaited[sent.id] = sent
            sent.await_contributions(self.id, *of)

    def before_collecting(self, sent: SentArguments) -> None:
        """A send node is about to wait for contributions: others are to work meanwhile."""
        if not all(awaited.is_settled for awaited in sent.awaited_in(self.id)):
            self._flush()

    def _flush(self) -> None:
        for gathering in tuple(self._gatherings.values()):
            gathering.flush()

    def wait_for_requests(self) -> None:
        """Waits until all is done that follows from what ran so far."""
        self._flush()
        for propagation in self._sent:
            propagation.wait()
        self._sent.clear()

    def finish(self) -> None:
        """At the end of the graph task: waits for all responses. What it raises, `backward()` raises."""
        with self:
            if torch.is_grad_enabled() is self.create_graph:
                self._wait_for_all()
            else:
                with torch.set_grad_enabled(self.create_graph):
                    self._wait_for_all()
            if self.awaiting_end and self._pass_id is not None:
                self._run_hooks(self._pass_id)
        self._finished = True
        self._forget()

    def _wait_for_all(self) -> None:
        self.wait_for_requests()
        for gathering in tuple(self._gatherings.values()):
            gathering.finish()
        self.wait_for_requests()

    def _run_hooks(self, pass_id: AutogradMessageId) -> None:
        """Runs the hooks that wait for the end of the pass, if it ends with this task."""
        if self._started_at is not None:
            self._started_at.passes.hooks.add_links(pass_id, self.awaiting_end)
            run_waiting_hooks(self._started_at, pass_id)
        elif self.run is not None:
            self.run.engine.passes.hooks.add_links(pass_id, self.awaiting_end)

    def abandon(self) -> None:
        """The graph task failed: its requests are cancelled."""
        self._finished = True
        for propagation in self._sent:
            propagation.cancel()
        for gathering in tuple(self._gatherings.values()):
            gathering.abandon()
        self._forget()

    def _forget(self) -> None:
        if self._started_at is not None and self._pass_id is not None:
            self._started_at.passes.end(self._pass_id)
        for sent in self.awaited.values():
            sent.forget(self.id)
        self.awaited.clear()
        self._sent.clear()
        self._gatherings.clear()

    def __del__(self) -> None:
        # The engine drops the callbacks of a graph task in which a node raised.
        if not self._finished:
            self.abandon()


_tasks: weakref.WeakValueDictionary[int, GraphTaskState] = weakref.WeakValueDictionary()
_tasks_lock = threading.Lock()


def current_task() -> GraphTaskState:
    """The state of the graph task that runs now, for a recv node in it."""
    id = current_graph_task_id()
    task = _tasks.get(id)
    if task is None:
        # The nodes of a graph task run on several threads if they are on several devices.
        with _tasks_lock:
            task = _tasks.get(id)
            if task is None:
                task = _tasks[id] = GraphTaskState(id, current_run())
                queue_callback(task.finish)
    return task


def find_task(id: int) -> GraphTaskState | None:
    return _tasks.get(id)
