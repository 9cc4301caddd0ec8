"""Refuses to work in a process that was forked from a process that used gradwire.

gRPC's threads do not come along into the forked process, so that its links would hang.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

from gradwire.errors import ForkedProcess

if TYPE_CHECKING:
    from gradwire.peers.local import LocalPeer

__all__ = ["live_peers", "refuse_if_forked"]

live_peers: weakref.WeakSet[LocalPeer] = weakref.WeakSet()
"""The peers of this process: one for the program, one for each worker in it."""
_forked_from: int | None = None
"""The id of the parent process, if that had used gradwire before it forked this process."""


def refuse_if_forked() -> None:
    """Raises ForkedProcess in a process that was forked from a process that used gradwire."""
    if _forked_from is not None:
        raise ForkedProcess(
            f"process {_forked_from} used gradwire before it forked this one, and gRPC's threads did "
            'not come along; start processes with multiprocessing\'s "spawn" method instead'
        )


def _after_fork() -> None:
    global _forked_from
    if live_peers:
        _forked_from = os.getppid()
    live_peers.clear()


os.register_at_fork(after_in_child=_after_fork)
