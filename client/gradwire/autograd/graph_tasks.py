"""One graph task of PyTorch's engine: what it has asked of other nodes, and what it waits for.

`backward()` on this node is one graph task; so is each run on behalf of another node. A pass is all the
graph tasks, on all nodes, that one backward() sets off.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gradwire.autograd.edges import edge_of
from gradwire.autograd.groups import awaited_by
from gradwire.autograd.hooks import run_waiting_hooks
from gradwire.autograd.merging import Merges
from gradwire.autograd.propagating import Batch, Propagation, propagate
from gradwire.autograd.records import Gradients, ReceivedTensors, SentArguments
from gradwire.runtime.context_vars import unstash
from gradwire.wire.ids import AutogradMessageId, ContextId

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine
    from gradwire.autograd.holding import HeldRun
    from gradwire.transport.base import Link

__all__ = [
    "RUN_MARKER",
    "RUN_MARKER_GRADIENT",
    "BackwardRun",
    "GraphTaskState",
    "collect",
    "current_run",
    "current_task",
    "find_task",
    "running",
]

_RUN_KEY = "gradwire.run"


@dataclass(slots=True)
class BackwardRun:
    """A backward that gradwire itself started: on behalf of another node, or for a context."""

    engine: DistEngine
    pass_id: AutogradMessageId
    requester: int | None
    """The node that asked. Contributions to its messages go into the response."""
    collect_leaves: bool
    collect_into: ContextId | None
    create_graph: bool = False
    retain_graph: bool = True
    """For a run on behalf of another node: the graph is kept until that node lets go of it."""
    contributions: list[tuple[AutogradMessageId, Gradients]] = field(default_factory=list)
    held: HeldRun | None = None
    """Set if it is held open for gradients that are still to come."""
    checks: list[Callable[[], None]] = field(default_factory=list)
    """Of the results that it starts from: each raises if parameters are no longer those of the forward."""

    def check_fresh(self) -> None:
        for check in self.checks:
            check()

    def answers(self, received: ReceivedTensors) -> bool:
        """Whether gradients for a message go into the response: the one who asked goes on from there."""
        return received.are_arguments and received.source.peer == self.requester

    def contribute(self, received: ReceivedTensors, gradients: Gradients) -> None:
        received.spend(gradients, for_good=not self.retain_graph)
        self.contributions.append((received.source, gradients))


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
    """Tells the nodes that run inside about a run: torch carries such objects to its engine's threads."""

    __slots__ = ("_before", "_run")

    def __init__(self, run: BackwardRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._before = torch._C._get_obj_in_tls(_RUN_KEY) if torch._C._is_key_in_tls(_RUN_KEY) else None
        torch._C._stash_obj_in_tls(_RUN_KEY, self._run)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            unstash(_RUN_KEY)
        else:
            torch._C._stash_obj_in_tls(_RUN_KEY, self._before)


def current_run() -> BackwardRun | None:
    """The run whose graph task runs now.

    Code that runs in backward may start graph tasks of its own, to which torch hands on what is said of the
    run: they are not part of it. Those that are have the marker among their nodes.
    """
    if not torch._C._is_key_in_tls(_RUN_KEY) or not torch._C._will_engine_execute_node(RUN_MARKER.node):
        return None
    run: BackwardRun | None = torch._C._get_obj_in_tls(_RUN_KEY)
    return run


class GraphTaskState:
    """One graph task. Kept alive by the callback that the engine runs at its end.

    What is done for it is done `with` it: a failure abandons it at once, since the traceback of the error
    refers to it, so that its destructor may come late.
    """

    def __init__(self, id: int, run: BackwardRun | None, all_leaves_wanted: Callable[[], bool]) -> None:
        self.id = id
        self.run = run
        self.collect_leaves = run.collect_leaves if run is not None else all_leaves_wanted()
        self.create_graph = torch.is_grad_enabled()
        keeps: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
        self.retain_graph = run.retain_graph if run is not None else keeps()
        self._pass_id = run.pass_id if run is not None else None
        self._started_at: DistEngine | None = None
        """The engine that started the pass with this very task."""
        self.awaited: dict[AutogradMessageId, SentArguments] = {}
        """Arguments for which responses may bring mail."""
        self.awaiting_end: set[Link] = set()
        """To peers where hooks wait for the end of the pass."""
        self._sent: list[Propagation] = []
        self._merges = Merges()
        self._finished = False

    def pass_id(self, engine: DistEngine) -> AutogradMessageId:
        if self._pass_id is None:
            self._pass_id = engine.start_pass()
            self._started_at = engine
        return self._pass_id

    def is_in_pass(self, pass_id: AutogradMessageId) -> bool:
        return self._pass_id == pass_id

    def __enter__(self) -> None:
        pass

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        if failure is not None:
            self.abandon()

    def dispatch(self, received: ReceivedTensors, gradients: Gradients) -> None:
        """Sends gradients on their way, without waiting, or gathers them."""
        received.spend(gradients, for_good=not self.retain_graph)
        if received.group is None or not received.group.has_others or self.create_graph:
            self.send(Batch([(received, gradients)], like=received))
        else:
            self._merges.expecting(received, received.group).add(received, gradients, self)

    def pass_by(self, received: ReceivedTensors) -> None:
        """The recv node of a message ran without a gradient."""
        if received.group is not None and received.group.has_others:
            self._merges.expecting(received, received.group).pass_by(received, self)

    def send(self, batch: Batch) -> Propagation:
        """Sends gradients on their way, without waiting."""
        sent: list[Propagation] = []

        def expect(propagation: Propagation) -> None:
            sent.append(propagation)
            self._sent.append(propagation)
            later = batch.held.to_come if batch.held is not None else ()
            going_on = [*(received for received, _ in batch.items), *batch.not_awaited]
            for arguments in awaited_by(going_on, later):
                self.awaited[arguments.id] = arguments
                arguments.await_response(self.id, propagation)

        propagate(batch.like.engine, batch, self, expect)
        return sent[0]

    def before_collecting(self, sent: SentArguments) -> None:
        """A send node is about to wait for its mail: what was gathered for that mail has to go first."""
        if sent.group is not None:
            for merge in self._merges.of(sent.group):
                merge.flush(self, may_wait=True)
        if self._merges and not all(propagation.is_settled for propagation in sent.awaited_in(self.id)):
            self._flush()  # so that others work meanwhile

    def _flush(self) -> None:
        for merge in self._merges:
            merge.flush(self, may_wait=False)

    def settle(self) -> None:
        """Waits until all is done that follows from what ran so far."""
        self._flush()
        for merge in self._merges:
            merge.flush(self, may_wait=True)
        for propagation in self._sent:
            propagation.wait()
        self._sent.clear()

    def finish(self) -> None:
        """At the end of the graph task: waits for all responses. What it raises reaches the user."""
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
        if self._merges:
            self._flush()
            for merge in self._merges:
                merge.finish(self)
        for propagation in self._sent:
            propagation.wait()

    def _run_hooks(self, pass_id: AutogradMessageId) -> None:
        """Runs the hooks that wait for the end of the pass, if it ends with this task."""
        if self._started_at is not None:
            self._started_at.hooks.add_links(pass_id, self.awaiting_end)
            run_waiting_hooks(self._started_at, pass_id)
        elif self.run is not None:
            self.run.engine.hooks.add_links(pass_id, self.awaiting_end)

    def abandon(self) -> None:
        """The graph task failed: nobody wants the responses."""
        self._finished = True
        for propagation in self._sent:
            propagation.cancel()
        for merge in self._merges:
            merge.abandon()
        self._forget()

    def _forget(self) -> None:
        if self._started_at is not None and self._pass_id is not None:
            self._started_at.end_pass(self._pass_id)
        for sent in self.awaited.values():
            sent.forget(self.id)
        self.awaited.clear()
        self._sent.clear()
        self._merges.clear()

    def __del__(self) -> None:
        # The engine drops the callbacks of a graph task in which a node raised.
        if not self._finished:
            self.abandon()


_tasks: weakref.WeakValueDictionary[int, GraphTaskState] = weakref.WeakValueDictionary()
_tasks_lock = threading.Lock()


def current_task(all_leaves_wanted: Callable[[], bool]) -> GraphTaskState:
    """The graph task that runs now, for a recv node in it."""
    id = torch._C._current_graph_task_id()
    task = _tasks.get(id)
    if task is None:
        # The nodes of a graph task run on several threads if they are on several devices.
        with _tasks_lock:
            task = _tasks.get(id)
            if task is None:
                task = _tasks[id] = GraphTaskState(id, current_run(), all_leaves_wanted)
                torch.autograd.Variable._execution_engine.queue_callback(task.finish)
    return task


def find_task(id: int) -> GraphTaskState | None:
    return _tasks.get(id)


def collect(sent: SentArguments) -> Gradients:
    """Waits for the mail of a send node in the graph task that runs now, and takes it."""
    id = torch._C._current_graph_task_id()
    task = find_task(id)
    if task is None:
        return sent.collect(id)
    with task:
        task.before_collecting(sent)
        return sent.collect(id)
