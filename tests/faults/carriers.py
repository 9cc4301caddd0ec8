"""What may carry a session, and how each carrier dies: its sockets are shut down at any moment, or nobody can
connect to them any more.

The product is not asked: the kernel says which sockets this process has, and what they are.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gradwire.transport import GrpcStream, SocketCarrier

__all__ = ["CARRIERS", "FLAGS", "SETTINGS", "block", "carrier_of", "cut", "cut_now_and_then"]

SETTINGS: Mapping[str, Mapping[str, bool]] = {
    "unix": {},
    "tcp": {"same_host": False},
    "grpc": {"same_host": False, "direct": False},
}
"""For each carrier what `gw.connect` has to be told so that it is used, on one host."""
FLAGS: Mapping[str, Sequence[str]] = {
    "unix": (),
    "tcp": ("--no-same-host",),
    "grpc": ("--no-same-host", "--no-direct"),
}
"""For each carrier what a daemon has to be told so that its clients use it, other workers included."""
CARRIERS = tuple(SETTINGS)

_UNIX_PREFIX = b"\0gradwire-"
_KEEPALIVE_PROBES = 3
"""What direct sockets are set to, and no others."""


def carrier_of(link: Any) -> str | None:
    """What carries the session of a link now; None if it is cut."""
    stream = link._carrier
    if isinstance(stream, SocketCarrier):
        return "unix" if stream.is_local else "tcp"
    return "grpc" if isinstance(stream, GrpcStream) else None


def cut(carriers: Collection[str] = CARRIERS) -> Counter[str]:
    """Shuts down the connections of this process that are such carriers. Returns how many there were."""
    return _shut_down(carriers, are_listening=False)


def block(carriers: Collection[str]) -> Counter[str]:
    """Lets nobody connect to such sockets of this process any more. Returns how many there were."""
    return _shut_down(carriers, are_listening=True)


@contextmanager
def cut_now_and_then(
    seed: int, between: tuple[float, float] = (0.0, 0.05), places: Sequence[Callable[..., Any]] = (cut,)
) -> Iterator[Counter[str]]:
    """Cuts one of the carriers at random moments while the block runs, by one of these functions: `cut` here,
    or where it is served. Yields how many sockets were cut."""
    chance, over, count = random.Random(seed), threading.Event(), Counter[str]()

    def run() -> None:
        while not over.wait(chance.uniform(*between)):
            count.update(chance.choice(places)([chance.choice(CARRIERS)]))

    thread = threading.Thread(target=run, name="test-cuts", daemon=True)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()


def _shut_down(carriers: Collection[str], *, are_listening: bool) -> Counter[str]:
    count = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        # Not a duplicate, which would keep the socket open. Should the number be another socket's meanwhile,
        # that one is cut, which is as good.
        try:
            found = socket.socket(fileno=int(name))
        except OSError:
            continue  # it is no socket, or was closed
        try:
            is_listening = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            carrier = _carried(found, is_listening)
            if carrier in carriers and is_listening == are_listening:
                found.shutdown(socket.SHUT_RDWR)
                count[carrier] += 1
        except OSError:
            pass  # the other end was faster
        finally:
            found.detach()
    return count


def _carried(found: socket.socket, is_listening: bool) -> str:
    if found.family == socket.AF_UNIX:
        # Of two ends that are connected, only the accepted one has a name.
        named = found.getsockname() or ("" if is_listening else found.getpeername())
        return "unix" if isinstance(named, bytes) and named.startswith(_UNIX_PREFIX) else ""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return ""
    if is_listening:  # gRPC sets this where it listens
        return "grpc" if found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) else "tcp"
    probes = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
    return "tcp" if probes == _KEEPALIVE_PROBES else "grpc"
