"""A node: this process, or one worker in it, as others see it.

A node has an id and a name, answers questions that come over its links, and keeps its links to others.
A plain program has one, made when it is first needed; each `gradwire_server.Worker` has its own.
"""

from __future__ import annotations

import atexit
import os
import random
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gradwire import errors
from gradwire._scope import current_scope
from gradwire.proto.v1 import link_pb2
from gradwire.transport import Exchange, GrpcLink, Handler, Identity, Link, LinkSettings, faults

__all__ = ["Node", "SharedLink", "current_node", "default_node"]

_MAX_THREADS = 10_000
"""No ceiling in earnest: a thread that waits for another call must never keep that call from running."""


class Node:
    """One participant."""

    def __init__(self, name: str | None = None) -> None:
        name = name or f"{socket.gethostname()}-{os.getpid()}"
        self.identity = Identity(random.getrandbits(64), name)
        self.pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="gradwire")
        self.methods: dict[int, Handler] = {link_pb2.METHOD_PING: lambda exchange: exchange.reply(b"")}
        self._lock = threading.Lock()
        self._places: dict[tuple[str, LinkSettings], SharedLink] = {}
        self._closed = False
        _nodes.add(self)

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

    def place_for(self, target: str, settings: LinkSettings) -> SharedLink:
        """Where the link to a worker is, or will be."""
        with self._lock:
            if self._closed:
                raise errors.LinkClosed(f"{self.identity.name} has been shut down")
            key = (target, settings)
            if key not in self._places:
                self._places[key] = SharedLink(lambda: self._connect(target, settings))
            return self._places[key]

    def _connect(self, target: str, settings: LinkSettings) -> Link:
        if _forked_from is not None:
            raise errors.ForkedProcess(
                f"process {_forked_from} used gradwire before it forked this one, and gRPC's threads did "
                'not come along; start processes with multiprocessing\'s "spawn" method instead'
            )
        link = GrpcLink(target, self.identity, self.handle, settings)
        link.connect()
        return link

    def close(self) -> None:
        """Ends all links and threads."""
        with self._lock:
            self._closed = True
            places, self._places = list(self._places.values()), {}
        for place in places:
            place.close()
        self.pool.shutdown(wait=False)


class SharedLink:
    """A place for the link to one worker, made when it is first needed and again when it was lost."""

    def __init__(self, connect: Callable[[], Link]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    def get(self) -> Link:
        link = self._link
        if link is not None and link.ended is None:
            return link
        # Whoever comes while another connects waits for the same connection.
        with self._lock:
            if self._link is None or self._link.ended is not None:
                self._link = self._connect()
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

    def close(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()
_default: Node | None = None
_default_lock = threading.Lock()
_forked_from: int | None = None


def default_node() -> Node:
    """The node of the program itself."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Node()
        return _default


def current_node() -> Node:
    """The worker whose function runs now, else the program's own node."""
    return current_scope().node or default_node()


@atexit.register
def _say_goodbye() -> None:
    for node in list(_nodes):
        node.close()


def _after_fork() -> None:
    global _default, _default_lock, _forked_from
    if _nodes:
        _forked_from = os.getppid()
    _default, _default_lock = None, threading.Lock()
    _nodes.clear()


os.register_at_fork(after_in_child=_after_fork)
