"""A node: this process, or one worker in it, as others see it.

A node has an id and a name, answers questions that come over its links, and keeps its links to others.
A plain program has one, made when it is first needed; each `gradwire_server.Worker` has its own.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial

from gradwire import errors
from gradwire._randomness import new_id
from gradwire._scope import Scope, current_scope, deadline, entered
from gradwire._threads import DaemonThreads, computing, end_computing
from gradwire.autograd import ContextId, Participant, serve_cleanup, serve_propagate
from gradwire.proto.v1 import link_pb2
from gradwire.transport import Exchange, GrpcLink, Handler, Identity, Link, LinkSettings, faults
from gradwire.transport.base import call_each

__all__ = ["Again", "Node", "SharedLink", "current_context_id", "current_node", "default_node"]


_GLANCE_SECONDS = 0.5
"""How long to look whether a worker that was lost is back."""
_EXIT_SECONDS = 1.0
"""How long the end of the process waits for what still computes for others."""


class Node:
    """One participant."""

    def __init__(self, name: str | None = None) -> None:
        name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.identity = Identity(new_id(), name)
        # Without a ceiling: a thread that waits for another call must never keep that call from running.
        self.pool = DaemonThreads("gradwire")
        self.participant = Participant(self.identity.node, self.find_link)
        self.methods: dict[int, Handler] = {
            link_pb2.METHOD_PING: lambda exchange: exchange.reply(b""),
            link_pb2.METHOD_PROPAGATE_GRADIENTS: self._serve_propagate,
            link_pb2.METHOD_CLEANUP_CONTEXT: partial(serve_cleanup, self.participant),
        }
        self._runs = 0
        self._runs_lock = threading.Lock()
        self._runs_ended = threading.Condition(self._runs_lock)
        self._end_of_runs_is_awaited = False
        self._lock = threading.Lock()
        self._links: dict[int, list[Link]] = {}
        self._places: dict[tuple[str, LinkSettings], SharedLink] = {}
        self._closed = False
        _nodes.add(self)

    @property
    def serves_functions(self) -> bool:
        return link_pb2.METHOD_FORWARD_WITH_AUTOGRAD in self.methods

    def handle(self, exchange: Exchange) -> None:
        """Answers a question that came over any link of this node."""
        handler = self.methods.get(exchange.method)
        if handler is None:
            exchange.fail(faults.describe(self._not_served(exchange.method), self.identity.name))
        else:
            handler(exchange)

    def _not_served(self, method: int) -> errors.GradwireError:
        if method in (link_pb2.METHOD_FORWARD_WITH_AUTOGRAD, link_pb2.METHOD_DESCRIBE):
            return errors.UnknownFunction(
                f"{self.identity.name} serves no functions; a process does so by running a "
                "gradwire_server.Worker",
                worker=self.identity.name,
            )
        return errors.ProtocolError(f"{self.identity.name} does not know method {method}")

    def _serve_propagate(self, exchange: Exchange) -> None:
        with self._runs_lock:
            self._runs += 1
        if exchange.may_run_here():
            self._run_backward(exchange)
        else:
            # A thread of its own for each, without a ceiling: runs wait for one another.
            self.pool.submit(self._run_backward, exchange)

    def _run_backward(self, exchange: Exchange) -> None:
        try:
            self.answer(exchange, partial(serve_propagate, self.participant))
        finally:
            with self._runs_lock:
                self._runs -= 1
                if self._end_of_runs_is_awaited:
                    self._runs_ended.notify_all()

    def wait_for_backwards(self, timeout: float) -> bool:
        """Whether all backwards that others asked for were done in time."""
        with self._runs_ended:
            self._end_of_runs_is_awaited = True
            return self._runs_ended.wait_for(lambda: self._runs == 0, timeout)

    def answer(
        self,
        exchange: Exchange,
        work: Callable[[Exchange], None],
        around_wait: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Does work in the scope of a question. Whatever it raises becomes the answer."""
        scope = Scope(self, exchange, exchange.deadline, around_wait=around_wait)
        try:
            # Whatever runs a backward here enters a scope of its own, in the context that was asked for.
            with computing(), entered(scope, carried=False):
                exchange.begin()
                if exchange.cancelled or exchange.deadline is not None:
                    self._check_wanted(exchange)
                work(exchange)
        except BaseException as error:  # a served function may raise SystemExit; the node goes on
            exchange.fail(faults.describe(error, self.identity.name))

    def _check_wanted(self, exchange: Exchange) -> None:
        name = self.identity.name
        if exchange.cancelled:
            raise errors.Cancelled("the call was cancelled before it started", worker=name)
        left = deadline()
        if left is not None and left <= 0:
            raise errors.DeadlineExceeded(f"the time ran out before {name} could start", worker=name)

    # -- links

    def find_link(self, node: int) -> Link | None:
        """A link to another node, whoever opened it."""
        with self._lock:
            links = self._links.get(node)
            return links[-1] if links else None

    @property
    def links(self) -> list[Link]:
        """All links, whoever opened them."""
        with self._lock:
            return [link for links in self._links.values() for link in links]

    def met(self, link: Link) -> None:
        """A link is open. When the last one to a node ends, what was held for that node goes."""
        with self._lock:
            self._links.setdefault(link.peer.node, []).append(link)
        link.when_ended(self._parted)

    def _parted(self, link: Link) -> None:
        node = link.peer.node
        with self._lock:
            links = self._links.get(node, [])
            if link in links:
                links.remove(link)
            if links:
                return
            self._links.pop(node, None)
        # One that closed this link may still come by way of others. One that leaves, or is lost, is gone.
        closed = link.ended if isinstance(link.ended, errors.LinkClosed) else None
        self.participant.forget_client(node, is_gone=closed is None or closed.leaving)

    def place_for(self, target: str, settings: LinkSettings) -> SharedLink:
        """Where the link to a worker is, or will be."""
        with self._lock:
            if self._closed:
                raise errors.LinkClosed(f"{self.identity.name} has been shut down")
            key = (target, settings)
            if key not in self._places:
                connect = partial(self._connect, target, settings)
                self._places[key] = SharedLink(self.participant, target, connect, settings.lost_after)
            return self._places[key]

    def _connect(self, target: str, settings: LinkSettings, again: Again | None) -> Link:
        if self._closed:
            raise errors.LinkClosed(f"{self.identity.name} has been shut down")
        link = GrpcLink(target, self.identity, self.handle, settings)
        if again is None or not settings.wait_for_ready:
            link.connect(deadline())
        else:
            is_lost = again is Again.LOST
            patience = min(settings.connect_timeout, _GLANCE_SECONDS if is_lost else settings.lost_after)
            try:
                link.connect(deadline(), patience=patience, tries_again=not is_lost)
            except errors.ConnectFailed as error:
                message = f"{target} was there and is gone: {error}"
                raise errors.WorkerLost(message, worker=target) from error
        self.met(link)
        return link

    def close(self) -> None:
        """Ends all links and threads."""
        with self._lock:
            self._closed = True
            places, self._places = list(self._places.values()), {}
        for place in places:
            place.close(leaving=True)
        self.participant.close()
        self.pool.shutdown(wait=False)


class Again(Enum):
    """Why a worker is connected to that was connected before. Either takes no longer than its loss may."""

    NEEDED = "needed"
    """What it is needed for begins now. It has `lost_after` seconds to answer, else it counts as lost."""
    LOST = "lost"
    """It was out of reach for so long already. It is asked once whether it is back."""


class SharedLink:
    """A place for the link to one worker, made when it is first needed and again when it was lost."""

    def __init__(
        self,
        participant: Participant,
        target: str,
        connect: Callable[[Again | None], Link],
        lost_after: float = LinkSettings.lost_after,
    ) -> None:
        self.participant = participant
        self._target = target
        self._connect = connect
        self._lost_after = lost_after
        self._connecting = threading.Lock()
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._failures = 0
        """How often connecting has failed."""
        self._failure: errors.GradwireError | None = None
        """Why it did the last time, unless it worked since."""
        self._failed_again: Again | None = None
        """What it was tried for then, and so for how long."""
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    def get(self, again: Again | None = None) -> Link:
        """The link. Connects if need be, for as long as the deadline in force allows.

        For who had a link before, `again` says why: then the worker is lost if it does not answer soon.
        """
        refuse_if_forked()
        link = self._link
        if link is not None and link.ended is None:
            return link
        if again is Again.LOST and not (link is not None and link.was_waited_for):
            again = Again.NEEDED  # it ended for another reason: the worker may well be there
        # Whoever comes while another connects waits for the same connection, or for the same failure.
        failures = self._failures
        left = deadline()
        waits = -1 if left is None else left
        if again is not None and not 0 <= waits < self._lost_after:
            waits = self._lost_after
        if not self._connecting.acquire(timeout=waits):
            message = f"no time left to wait for the connection to {self._target}"
            raise (errors.DeadlineExceeded if waits == left else errors.WorkerLost)(
                message, worker=self._target
            )
        try:
            if self._link is None or self._link.ended is not None:
                is_shared = self._failures != failures and again is self._failed_again
                if is_shared and self._failure is not None:
                    raise self._failure.again()
                try:
                    self._link, self._failure = self._connect(again), None
                except errors.LinkError as error:
                    self._failures += 1
                    self._failure, self._failed_again = error.again(), again
                    raise
            return self._link
        finally:
            self._connecting.release()

    @property
    def link(self) -> Link | None:
        """The link as it is: maybe ended, None if there was none yet."""
        return self._link

    def join(self, user: object) -> None:
        with self._lock:
            self._users.add(user)

    def leave(self, user: object) -> None:
        """Ends the link if this was its last user. Users that were just dropped do not count, so that a
        program may ask for a handle whenever it needs one and pay for one link."""
        with self._lock:
            self._users.discard(user)
            unused = not self._users
        if unused:
            self.close()

    def close(self, *, leaving: bool = False) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(leaving=leaving)


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()
_default: Node | None = None
_default_lock = threading.Lock()
_forked_from: int | None = None


def default_node() -> Node:
    """The node of the program itself."""
    global _default
    node = _default
    if node is not None:
        return node
    with _default_lock:
        if _default is None:
            _default = Node()
        return _default


def reset_default_node() -> None:
    """Ends the program's own node; the next use makes a new one."""
    global _default
    with _default_lock:
        node, _default = _default, None
    if node is not None:
        node.close()


def refuse_if_forked() -> None:
    """Raises ForkedProcess in a process that was forked off one that used gradwire."""
    if _forked_from is not None:
        raise errors.ForkedProcess(
            f"process {_forked_from} used gradwire before it forked this one, and gRPC's threads did "
            'not come along; start processes with multiprocessing\'s "spawn" method instead'
        )


def current_node() -> Node:
    """The worker whose function runs now, else the program's own node."""
    return current_scope().node or default_node()


def current_context_id() -> ContextId:
    """The autograd context that calls are made in."""
    scope = current_scope()
    if scope.context is not None:
        return scope.context
    return (scope.node or default_node()).participant.ambient


@atexit.register
def _say_goodbye() -> None:
    """Python calls this when all threads of the program have ended, which may have used gradwire so long."""
    call_each(node.close for node in list(_nodes))
    end_computing(_EXIT_SECONDS)


def _after_fork() -> None:
    global _default, _default_lock, _forked_from
    if _nodes:
        _forked_from = os.getppid()
    _default, _default_lock = None, threading.Lock()
    _nodes.clear()


os.register_at_fork(after_in_child=_after_fork)
