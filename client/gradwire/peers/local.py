"""A peer of this process: the program itself, or one worker in it, as other peers see it.

A peer has an id and a name, serves the requests that come over its links, and keeps its links to other peers.
A plain program has one peer, made when it is first needed; each `gradwire_server.Worker` has its own.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from gradwire import errors
from gradwire.autograd import DistEngine, serve_cleanup, serve_propagate
from gradwire.peers.forking import live_peers
from gradwire.peers.shared_links import Reconnect, SharedLink
from gradwire.proto.v1 import link_pb2
from gradwire.runtime.scope import Scope, deadline
from gradwire.system.threads import DaemonThreads, computing
from gradwire.torch_internals import check_engine
from gradwire.transport import (
    GrpcLink,
    Handler,
    KnownWorkers,
    Link,
    LinkSettings,
    OwnIdentity,
    ServerCall,
    Tls,
    faults,
)

__all__ = ["LocalPeer"]


_PROBE_SECONDS = 0.5
"""How long `Reconnect.PROBE` tries to reach a worker that was lost."""


class LocalPeer:
    """One peer: its identity, its autograd engine, the methods that it serves, and its links."""

    def __init__(self, name: str | None = None) -> None:
        name = name or f"{socket.gethostname()}-{os.getpid()}"
        check_engine()
        self.identity = OwnIdentity.new(name)
        self._known_workers = KnownWorkers()
        self.tls: Tls | None = None
        """How code of this peer connects to others if it does not say so itself. None: as the environment
        says."""
        self.followed: Sequence[str] | None = None
        """Patterns of the addresses that refs from other peers may lead this peer to, besides those that its
        own code has connected to. None: all."""
        # The pool has no maximum size: a thread that waits for another call must not keep that call from
        # running.
        self.pool = DaemonThreads("gradwire")
        self.engine = DistEngine(self.identity.id, self.find_link)
        self.methods: dict[int, Handler] = {
            link_pb2.METHOD_PING: lambda server_call: server_call.respond(b""),
            link_pb2.METHOD_PROPAGATE_GRADIENTS: self._serve_propagate,
            link_pb2.METHOD_CLEANUP_CONTEXT: partial(serve_cleanup, self.engine),
        }
        self._backwards = 0
        """How many backwards run here for other peers."""
        self._backwards_lock = threading.Lock()
        self._backwards_ended = threading.Condition(self._backwards_lock)
        self._end_of_backwards_is_awaited = False
        self._lock = threading.Lock()
        self._links: dict[int, list[Link]] = {}
        self._shared_links: dict[tuple[str, LinkSettings], SharedLink] = {}
        self._closed = False
        live_peers.add(self)

    @property
    def serves_functions(self) -> bool:
        """Whether this peer is a worker; a plain program serves no calls of functions."""
        return link_pb2.METHOD_FORWARD_WITH_AUTOGRAD in self.methods

    def dispatch(self, server_call: ServerCall) -> None:
        """Hands a request that came over any link of this peer to the handler of its method."""
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
        with self._backwards_lock:
            self._backwards += 1
        if server_call.may_run_inline():
            self._run_backward(server_call)
        else:
            # Each backward gets a thread of its own, however many there are: backwards wait for one another.
            self.pool.submit(self._run_backward, server_call)

    def _run_backward(self, server_call: ServerCall) -> None:
        try:
            self.serve(server_call, partial(serve_propagate, self.engine))
        finally:
            with self._backwards_lock:
                self._backwards -= 1
                if self._end_of_backwards_is_awaited:
                    self._backwards_ended.notify_all()

    def wait_for_backwards(self, timeout: float) -> bool:
        """Waits until no backward runs here for another peer. Returns False if the timeout ends first."""
        with self._backwards_ended:
            self._end_of_backwards_is_awaited = True
            return self._backwards_ended.wait_for(lambda: self._backwards == 0, timeout)

    def serve(
        self,
        server_call: ServerCall,
        work: Callable[[ServerCall, Scope], None],
        around_wait: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Runs the work of a request. Whatever the work raises becomes the response.

        The work enters the scope, or a copy with what the request names, before anything of the user's runs.
        """
        scope = Scope(self, server_call, server_call.deadline, around_wait=around_wait)
        try:
            with computing():
                server_call.begin()
                if server_call.cancelled or server_call.deadline is not None:
                    self._refuse_if_abandoned(server_call)
                work(server_call, scope)
        except BaseException as error:  # a served function may raise SystemExit; the peer goes on
            server_call.fail(faults.describe(error, self.identity.name))

    def _refuse_if_abandoned(self, server_call: ServerCall) -> None:
        """Raises if the requester has cancelled the request, or its deadline has passed, before it
        started."""
        name = self.identity.name
        if server_call.cancelled:
            raise errors.Cancelled("the request was cancelled before it started", worker=name)
        if server_call.deadline is not None and server_call.deadline <= time.monotonic():
            raise errors.DeadlineExceeded(f"the time ran out before {name} could start", worker=name)

    # -- links

    def find_link(self, peer: int) -> Link | None:
        """The newest link to another peer, opened by either end; None if there is none."""
        with self._lock:
            links = self._links.get(peer)
            return links[-1] if links else None

    @property
    def links(self) -> list[Link]:
        """All open links, whichever end opened them."""
        with self._lock:
            return [link for links in self._links.values() for link in links]

    def add_link(self, link: Link) -> None:
        """Registers a link that was opened. When the last link to a peer ends, the engine releases what it
        holds for that peer."""
        with self._lock:
            self._links.setdefault(link.peer.id, []).append(link)
        link.when_ended(self._remove_link)

    def _remove_link(self, link: Link) -> None:
        peer = link.peer.id
        with self._lock:
            links = self._links.get(peer, [])
            if link in links:
                links.remove(link)
            if links:
                return
            self._links.pop(peer, None)
        self._known_workers.forget(peer)
        # A peer that only closed this link may still take part by way of other peers. A peer that leaves, or
        # is lost, is gone.
        closed = link.ended if isinstance(link.ended, errors.LinkClosed) else None
        self.engine.forget_client(peer, is_gone=closed is None or closed.leaving)

    def tls_for(self, target: str) -> Tls | None:
        """How to connect to a worker if nobody says so: as this peer does, else as the environment says. What
        goes to a unix socket does not leave the host, and is plain text."""
        if target.startswith("unix:"):
            return None
        found = Tls.from_environment()
        if self.tls is None or found is None or found.server_name is None:
            return self.tls or found
        return replace(self.tls, server_name=found.server_name)

    def shared_link_to(self, target: str, settings: LinkSettings) -> SharedLink:
        """The link to a worker that all handles with the same target and settings share."""
        with self._lock:
            if self._closed:
                raise errors.LinkClosed(f"{self.identity.name} has been shut down")
            key = (target, settings)
            if key not in self._shared_links:
                connect = partial(self._connect, target, settings)
                self._shared_links[key] = SharedLink(self.engine, target, connect, settings.lost_after)
            return self._shared_links[key]

    def check_may_follow(self, address: str) -> None:
        """Raises PermissionDenied if refs from other peers may not lead this peer to an address."""
        if self.followed is None or any(_fits(address, pattern) for pattern in self.followed):
            return
        with self._lock:
            if any(target == address for target, _ in self._shared_links):
                return
        name = self.identity.name
        raise errors.PermissionDenied(
            f"{name} does not connect to {address}, where a ref leads that it was given; start it with "
            f"--follow {address} (Worker(follow=...)) to let it",
            worker=name,
        )

    def _connect(self, target: str, settings: LinkSettings, reconnect: Reconnect | None) -> Link:
        if self._closed:
            raise errors.LinkClosed(f"{self.identity.name} has been shut down")
        link = GrpcLink(target, self.identity, self.dispatch, settings, self._known_workers)
        if reconnect is None or not settings.wait_for_ready:
            link.connect(deadline())
        else:
            is_probe = reconnect is Reconnect.PROBE
            patience = min(settings.connect_timeout, _PROBE_SECONDS if is_probe else settings.lost_after)
            try:
                link.connect(deadline(), connect_timeout=patience, wait_for_ready=not is_probe)
            except errors.ConnectFailed as error:
                message = f"{target} was there and is gone: {error}"
                raise errors.WorkerLost(message, worker=target) from error
        self.add_link(link)
        return link

    def close(self) -> None:
        """Ends all links and threads of this peer."""
        with self._lock:
            self._closed = True
            shared_links, self._shared_links = list(self._shared_links.values()), {}
        for shared_link in shared_links:
            shared_link.close(leaving=True)
        self.engine.close()
        self.pool.shutdown(wait=False)


def _fits(address: str, pattern: str) -> bool:
    """Whether an address is of the form of a pattern, in which ``*`` stands for any text. (Not `fnmatch`: the
    brackets of an IPv6 address mean something else to it.)"""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), address, re.DOTALL) is not None
