"""hivemind: experts of a server process. Autograd reaches through their calls."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import cast

import torch
from hivemind.dht import DHT
from hivemind.moe.client.expert import create_remote_experts
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.moe.server.connection_handler import ConnectionHandler
from hivemind.moe.server.module_backend import ModuleBackend
from hivemind.moe.server.runtime import Runtime
from hivemind.p2p import PeerID
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor, nn

from benchmarks.functions import FUNCTIONS
from benchmarks.peers.member import LARGE, Call, run

END_SECONDS = 10.0
EXPERTS = {("echo", 16): "echo.0", ("echo", LARGE): "echo.1", ("scale", 16): "scale.0"}
"""By function and elements: an expert knows the shape of its arguments beforehand."""


class Function(nn.Module):
    """One of `functions.py` as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._function(x))


def serve(connection: Connection) -> None:
    """In the other process: until the connection ends.

    What hivemind's own server does, save for a thread that announces the experts again and again: processes
    that are forked while it runs hang at times.
    """
    torch.set_num_threads(1)
    dht = DHT(start=True)
    backends = {
        name: ModuleBackend(
            name,
            Function(FUNCTIONS[function]),
            args_schema=(BatchTensorDescriptor(elements),),
            outputs_schema=BatchTensorDescriptor(elements),
            max_batch_size=1,
        )
        for (function, elements), name in EXPERTS.items()
    }
    handler = ConnectionHandler(dht, backends)
    handler.run_in_background()
    runtime = Runtime(backends, device="cpu")
    runtime.start()
    runtime.ready.wait()
    connection.send((dht.peer_id.to_base58(), [str(address) for address in dht.get_visible_maddrs()]))
    try:
        connection.recv()
    except EOFError:
        pass
    handler.shutdown()
    runtime.shutdown()
    dht.shutdown()


@contextmanager
def connected() -> Iterator[Call]:
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe()
    process = processes.Process(target=serve, args=(there,))
    process.start()
    there.close()
    try:
        peer, addresses = here.recv()
        dht = DHT(initial_peers=addresses, start=True)
        infos = [ExpertInfo(uid=name, peer_id=PeerID.from_base58(peer)) for name in EXPERTS.values()]
        experts = dict(zip(EXPERTS, create_remote_experts(infos, dht), strict=True))

        def call(function: str, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(x.requires_grad):
                result: Tensor = experts[function, x.numel()](x.view(1, -1))
            return result.view(-1)

        yield call
        dht.shutdown()
    finally:
        here.close()
        process.join(END_SECONDS)
        process.kill()


if __name__ == "__main__":
    run(connected, has_backward=True)
