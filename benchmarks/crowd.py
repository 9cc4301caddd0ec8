"""Many clients of one worker, which then ask for nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

import gradwire as gw
from benchmarks.contenders import Carrier
from benchmarks.members import Member, member
from benchmarks.runtimes.gradwire import connect
from gradwire.peers.local import LocalPeer
from gradwire.runtime.scope import Scope, entered


class Crowd:
    """Clients that share this process.

    To a worker they are as many programs: a client is a peer, and each of these is one.
    """

    def __init__(self, address: str, carrier: Carrier) -> None:
        self._address = address
        self._carrier = carrier
        self._clients: list[tuple[LocalPeer, gw.RemoteWorker]] = []

    def grow_to(self, count: int) -> None:
        """Connects more of them; each makes a call, whose result is checked."""
        x = torch.arange(16.0)
        while len(self._clients) < count:
            peer = LocalPeer(f"client-{len(self._clients)}")
            with entered(Scope(peer=peer)):
                worker = connect(self._address, self._carrier)
                assert torch.equal(worker.call("echo", x), x)
            self._clients.append((peer, worker))
        if self._clients:
            seen = {client.name for client in self._clients[0][1].inspect().clients}
            assert seen >= {peer.identity.name for peer, _ in self._clients}, "the worker sees fewer clients"

    def close(self) -> None:
        for peer, _ in self._clients:
            peer.close()
        self._clients.clear()


def crowd(address: str, carrier: Carrier = Carrier.SAME_HOST) -> AbstractContextManager[Member]:
    """A process with such clients."""
    return member("crowd", Crowd, address, carrier)
