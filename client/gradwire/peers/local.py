"""A peer: this process, or one worker in it, as others see it.

A peer has an id and a name, answers questions that come over its links, and keeps its links to others.
A plain program has one, made when it is first needed; each `gradwire_server.Worker` has its own.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from gradwire import errors
from gradwire.autograd import DistEngine, serve_cleanup, serve_propagate
from gradwire.peers.connections import Again, WorkerConnection
from gradwire.peers.forking import live_peers
from gradwire.proto.v1 import link_pb2
from gradwire.runtime.scope import Scope, deadline, entered
from gradwire.system.randomness import new_id
from gradwire.system.threads import DaemonThreads, computing
from gradwire.torch_internals import check_engine
from gradwire.transport import GrpcLink, Handler, Link, LinkSettings, PeerIdentity, ServerCall, faults

__all__ = ["LocalPeer"]


_GLANCE_SECONDS = 0.5
"""How long to look whether a worker that was lost is back."""


class LocalPeer:
    """One engine."""

    def __init__(self, name: str | None = None) -> None:
        name = name or f"{socket.gethostname()}-{os.getpid()}"
        check_engine()
        self.identity = PeerIdentity(new_id(), name)
        # Without a ceiling: a thread that waits for another call must never keep that call from running.
        self.pool = DaemonThreads("gradwire")
        self.engine = DistEngine(self.identity.id, self.find_link)
        self.methods: dict[int, Handler] = {
            link_pb2.METHOD_PING: lambda server_call: server_call.respond(b""),
            link_pb2.METHOD_PROPAGATE_GRADIENTS: self._serve_propagate,
            link_pb2.METHOD_CLEANUP_CONTEXT: partial(serve_cleanup, self.engine),
        }
        self._runs = 0
        self._runs_lock = threading.Lock()
        self._runs_ended = threading.Condition(self._runs_lock)
        self._end_of_runs_is_awaited = False
        self._lock = threading.Lock()
        self._links: dict[int, list[Link]] = {}
        self._places: dict[tuple[str, LinkSettings], WorkerConnection] = {}
        self._closed = False
        live_peers.add(self)

    @property
    def serves_functions(self) -> bool:
        return link_pb2.METHOD_FORWARD_WITH_AUTOGRAD in self.methods

    def handle(self, server_call: ServerCall) -> None:
        """Answers a question that came over any link of this peer."""
        handler = self.methods.get(server_call.method)
        if handler is None:
            server_call.fail(faults.describe(self._not_served(server_call.method), self.identity.name))
        else:
            handler(server_call)

    def _not_served(self, method: int) -> errors.GradwireError:
        if method in (link_pb2.METHOD_FORWARD_WITH_AUTOGRAD, link_pb2.METHOD_DESCRIBE):
            return errors.UnknownFunction(
                f"{self.identity.name} serves no functions; a process does so by running a "
                "gradwire_server.Worker",
                worker=self.identity.name,
            )
        return errors.ProtocolError(f"{self.identity.name} does not know method {method}")

    def _serve_propagate(self, server_call: ServerCall) -> None:
        with self._runs_lock:
            self._runs += 1
        if server_call.may_run_inline():
            self._run_backward(server_call)
        else:
            # A thread of its own for each, without a ceiling: runs wait for one another.
            self.pool.submit(self._run_backward, server_call)

    def _run_backward(self, server_call: ServerCall) -> None:
        try:
            self.answer(server_call, partial(serve_propagate, self.engine))
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
        server_call: ServerCall,
        work: Callable[[ServerCall], None],
        around_wait: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Does work in the scope of a question. Whatever it raises becomes the answer."""
        scope = Scope(self, server_call, server_call.deadline, around_wait=around_wait)
        try:
            # Whatever runs a backward here enters a scope of its own, in the context that was asked for.
            with computing(), entered(scope, carried=False):
                server_call.begin()
                if server_call.cancelled or server_call.deadline is not None:
                    self._check_wanted(server_call)
                work(server_call)
        except BaseException as error:  # a served function may raise SystemExit; the peer goes on
            server_call.fail(faults.describe(error, self.identity.name))

    def _check_wanted(self, server_call: ServerCall) -> None:
        name = self.identity.name
        if server_call.cancelled:
            raise errors.Cancelled("the call was cancelled before it started", worker=name)
        left = deadline()
        if left is not None and left <= 0:
            raise errors.DeadlineExceeded(f"the time ran out before {name} could start", worker=name)

    # -- links

    def find_link(self, peer: int) -> Link | None:
        """A link to another peer, whoever opened it."""
        with self._lock:
            links = self._links.get(peer)
            return links[-1] if links else None

    @property
    def links(self) -> list[Link]:
        """All links, whoever opened them."""
        with self._lock:
            return [link for links in self._links.values() for link in links]

    def met(self, link: Link) -> None:
        """A link is open. When the last one to a peer ends, what was held for that peer goes."""
        with self._lock:
            self._links.setdefault(link.peer.id, []).append(link)
        link.when_ended(self._parted)

    def _parted(self, link: Link) -> None:
        peer = link.peer.id
        with self._lock:
            links = self._links.get(peer, [])
            if link in links:
                links.remove(link)
            if links:
                return
            self._links.pop(peer, None)
        # One that closed this link may still come by way of others. One that leaves, or is lost, is gone.
        closed = link.ended if isinstance(link.ended, errors.LinkClosed) else None
        self.engine.forget_client(peer, is_gone=closed is None or closed.leaving)

    def place_for(self, target: str, settings: LinkSettings) -> WorkerConnection:
        """Where the link to a worker is, or will be."""
        with self._lock:
            if self._closed:
                raise errors.LinkClosed(f"{self.identity.name} has been shut down")
            key = (target, settings)
            if key not in self._places:
                connect = partial(self._connect, target, settings)
                self._places[key] = WorkerConnection(self.engine, target, connect, settings.lost_after)
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
                link.connect(deadline(), connect_timeout=patience, wait_for_ready=not is_lost)
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
        self.engine.close()
        self.pool.shutdown(wait=False)
