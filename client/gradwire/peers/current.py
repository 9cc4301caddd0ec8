"""The peer that running code belongs to: a worker in its served functions, else the program itself."""

from __future__ import annotations

import atexit
import os
import threading

from gradwire.peers.forking import live_peers
from gradwire.peers.local import LocalPeer
from gradwire.runtime.scope import Scope, current_scope
from gradwire.system.callbacks import call_each
from gradwire.system.threads import end_computing
from gradwire.wire.ids import ContextId

__all__ = ["current_context_id", "current_peer", "default_peer", "peer_of", "reset_default_peer"]

_EXIT_SECONDS = 1.0
"""How long the exit of the process waits for code that still computes for other peers."""

_default: LocalPeer | None = None
_default_lock = threading.Lock()


def default_peer() -> LocalPeer:
    """The program's own peer, made when it is first needed."""
    global _default
    peer = _default
    if peer is not None:
        return peer
    with _default_lock:
        if _default is None:
            _default = LocalPeer()
        return _default


def reset_default_peer() -> None:
    """Ends the program's own peer; the next use makes a new one."""
    global _default
    with _default_lock:
        peer, _default = _default, None
    if peer is not None:
        peer.close()


def peer_of(scope: Scope) -> LocalPeer:
    """The peer that code in a scope belongs to."""
    peer = scope.peer
    return peer if isinstance(peer, LocalPeer) else default_peer()


def current_peer() -> LocalPeer:
    """The worker whose function runs now, else the program's own peer."""
    return peer_of(current_scope())


def current_context_id() -> ContextId:
    """The autograd context that calls are made in."""
    scope = current_scope()
    return peer_of(scope).engine.ambient if scope.context is None else scope.context


@atexit.register
def _close_all() -> None:
    """Closes all peers. Python calls this after all non-daemon threads have ended, so that these may use
    gradwire to their end."""
    call_each(peer.close for peer in list(live_peers))
    end_computing(_EXIT_SECONDS)


def _after_fork() -> None:
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
