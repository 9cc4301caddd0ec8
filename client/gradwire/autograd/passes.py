"""One graph task of PyTorch's engine: what it has asked of other nodes, and what it waits for.

`backward()` on this node is one graph task; so is each run on behalf of another node. A pass is all the
graph tasks, on all nodes, that one backward() sets off.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradwire._scope import current_scope
from gradwire.autograd.ids import ContextId, MessageId
from gradwire.autograd.records import Gradients, Received
from gradwire.errors import Cancelled, GradwireError
from gradwire.proto.v1 import autograd_pb2
from gradwire.transport.base import Pending

if TYPE_CHECKING:
    from gradwire.autograd.participant import Participant

__all__ = ["Propagation", "Run", "Task", "current_task", "find_task", "running"]

_RUN_KEY = "gradwire.run"


@dataclass(slots=True)
class Run:
    """A backward that gradwire itself started: on behalf of another node, or for a context."""

    participant: Participant
    pass_id: MessageId
    asker: int | None
    """The node that asked. Contributions to its messages go into the reply."""
    collect_leaves: bool
    collect_into: ContextId | None
    create_graph: bool = False
    retain_graph: bool = True
    """For a run on behalf of another node: the graph is kept until that node lets go of it."""
    contributions: list[tuple[MessageId, Gradients]] = field(default_factory=list)


@contextmanager
def running(run: Run) -> Iterator[None]:
    """Tells the nodes that run inside about the run: torch carries such objects to its engine's threads."""
    before = torch._C._get_obj_in_tls(_RUN_KEY) if torch._C._is_key_in_tls(_RUN_KEY) else None
    torch._C._stash_obj_in_tls(_RUN_KEY, run)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_RUN_KEY, before)


def current_run() -> Run | None:
    if not torch._C._is_key_in_tls(_RUN_KEY):
        return None
    run: Run | None = torch._C._get_obj_in_tls(_RUN_KEY)
    return run


class Propagation:
    """Gradients on their way to the node that sent the tensors, and what comes back."""

    def __init__(
        self,
        pending: Pending,
        deliver: Callable[[Any], None],
        append_unread: Callable[[tuple[type[Any], bytes]], None],
        what: str,
    ) -> None:
        self._pending = pending
        self._deliver: Callable[[Any], None] | None = deliver
        self._append_unread = append_unread
        self._lock = threading.Lock()
        self.what = what

    def wait(self) -> None:
        """Returns when everything that it set off is done and its contributions are in the mailboxes."""
        failure = self._wait_for_failure()
        if failure is not None:
            # A copy. The traceback of the one that the future keeps would lead back to the future, and
            # such a cycle keeps the activations of all frames on the way until the collector comes.
            raise _with_note(failure, f"while propagating gradients to {self.what}")
        with self._lock:
            if self._deliver is not None:
                deliver, self._deliver = self._deliver, None
                deliver(self._pending.result())

    def _wait_for_failure(self) -> BaseException | None:
        try:
            with current_scope().around_wait():
                return self._pending.exception()
        except CancelledError:
            return Cancelled("the backward that it was part of was given up")
        except BaseException:  # the user interrupts
            self._pending.cancel()
            raise

    def cancel(self) -> None:
        if self._pending.cancel():
            return
        with self._lock:
            deliver, self._deliver = self._deliver, None
        if deliver is not None and self._pending.exception() is None:
            # The answer came, but nobody will look into it.
            self._append_unread((autograd_pb2.PropagateGradientsReply, self._pending.result().body))


def _with_note(error: BaseException, note: str) -> BaseException:
    if isinstance(error, GradwireError):
        notes = getattr(error, "__notes__", ())
        error = error.again()
        error.__notes__ = [*notes, note]
    return error


class Task:
    """One graph task. Kept alive by the callback that the engine runs at its end."""

    def __init__(self, id: int, run: Run | None, all_leaves_wanted: Callable[[], bool]) -> None:
        self.id = id
        self.run = run
        self.collect_leaves = run.collect_leaves if run is not None else all_leaves_wanted()
        self.create_graph = torch.is_grad_enabled()
        keeps: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
        self.retain_graph = run.retain_graph if run is not None else keeps()
        self._pass_id = run.pass_id if run is not None else None
        self._started_at: Participant | None = None
        """The participant that started the pass with this very task."""
        self._sent: list[tuple[Received, Propagation]] = []
        self._finished = False

    def pass_id(self, participant: Participant) -> MessageId:
        if self._pass_id is None:
            self._pass_id = participant.start_pass()
            self._started_at = participant
        return self._pass_id

    def is_in_pass(self, pass_id: MessageId) -> bool:
        return self._pass_id == pass_id

    def dispatch(self, received: Received, gradients: Gradients) -> None:
        """Sends gradients on their way, without waiting."""
        try:
            self._dispatch(received, gradients)
        except BaseException:
            # At once: the traceback of the error refers to this task, so its destructor may come late.
            self.abandon()
            raise

    def _dispatch(self, received: Received, gradients: Gradients) -> None:
        received.spend(gradients, for_good=not self.retain_graph)
        run = self.run
        if run is not None and received.are_arguments and received.source.node == run.asker:
            run.contributions.append((received.source, gradients))
            return
        received.participant.propagate(received, gradients, self, partial(self._expect, received))

    def _expect(self, received: Received, propagation: Propagation) -> None:
        self._sent.append((received, propagation))
        for sent in received.depends_on:
            sent.await_reply(self.id, propagation)

    def finish(self) -> None:
        """At the end of the graph task: waits for all replies. What it raises reaches the user."""
        try:
            with torch.set_grad_enabled(self.create_graph):
                for _, propagation in self._sent:
                    propagation.wait()
        except BaseException:
            self.abandon()
            raise
        self._finished = True
        self._forget()

    def abandon(self) -> None:
        """The graph task failed: nobody wants the replies."""
        self._finished = True
        for _, propagation in self._sent:
            propagation.cancel()
        self._forget()

    def _forget(self) -> None:
        if self._started_at is not None and self._pass_id is not None:
            self._started_at.end_pass(self._pass_id)
        for received, _ in self._sent:
            for sent in received.depends_on:
                sent.forget(self.id)
        self._sent.clear()

    def __del__(self) -> None:
        # The engine drops the callbacks of a graph task in which a node raised.
        if not self._finished:
            self.abandon()


_tasks: weakref.WeakValueDictionary[int, Task] = weakref.WeakValueDictionary()


def current_task(all_leaves_wanted: Callable[[], bool]) -> Task:
    """The graph task that runs now, for a recv node in it."""
    id = torch._C._current_graph_task_id()
    task = _tasks.get(id)
    if task is None:
        task = _tasks[id] = Task(id, current_run(), all_leaves_wanted)
        torch.autograd.Variable._execution_engine.queue_callback(task.finish)
    return task


def find_task(id: int) -> Task | None:
    return _tasks.get(id)
