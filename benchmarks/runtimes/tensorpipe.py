"""`torch.distributed.rpc` over TensorPipe, as PyTorch's documentation says to use it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.distributed.optim import DistributedOptimizer

from benchmarks import functions
from benchmarks.runtimes.base import Module, Runtime, TrainingPass

RPC_SECONDS = 60.0
SETTLING_SECONDS = 30.0


def join(rendezvous: str, name: str, rank: int, size: int, *, tcp_only: bool) -> None:
    """Makes this process a member of an RPC world."""
    logging.captureWarnings(True)  # its own internals use what it deprecates, and insist on saying so
    # libuv sockets for messages, and for tensors the channel that sends them over those sockets. The other
    # channel over TCP, mpt_uv, spreads a tensor over 16 threads and sockets; on 2 cores a first try found it
    # no faster.
    only_tcp: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if tcp_only else {}
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=RPC_SECONDS, init_method=rendezvous, **only_tcp)
    rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def settle() -> None:
    """Waits until no call of this process is open.

    A context is cleaned up after its block, without waiting. Were the process stopped meanwhile, that would
    time out, and be tried again.
    """
    give_up_at = time.monotonic() + SETTLING_SECONDS
    agent = rpc.api._get_current_rpc_agent()  # type: ignore[attr-defined]
    while agent.get_debug_info()["agent.client_active_calls"] != "0":
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"calls are open after {SETTLING_SECONDS:g} s")
        time.sleep(0.0005)


def leave() -> None:
    """Waits for the other members to leave, too."""
    rpc.shutdown(timeout=10)


def chain(x: Tensor, route: list[str]) -> Tensor:
    """Works a little, and passes the result on along the route."""
    y = functions.scale(x)
    return cast(Tensor, rpc.rpc_sync(route[0], chain, args=(y, route[1:]))) if route else y


def parameter_refs(module: Any) -> list[Any]:
    """Refs to the parameters of a module of this process."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


class RemoteModule:
    """A module that a ref points to."""

    def __init__(self, worker: str, module: type[nn.Module], args: tuple[Any, ...]) -> None:
        self._ref = rpc.remote(worker, module, args=args)
        self.parameter_refs = rpc.rpc_sync(worker, parameter_refs, args=(self._ref,))

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._ref.rpc_sync().forward(x))


class DistributedPass(TrainingPass):
    """A context of `torch.distributed.autograd`."""

    def __init__(self, context: int, optimizer: DistributedOptimizer | None) -> None:
        self._context = context
        self._optimizer = optimizer

    def backward(self, loss: Tensor) -> None:
        dist_autograd.backward(self._context, [loss])  # type: ignore[attr-defined]

    def gradients(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        found = dist_autograd.get_gradients(self._context)  # type: ignore[attr-defined]
        return [found[leaf] for leaf in leaves]

    def step(self) -> None:
        assert self._optimizer is not None
        self._optimizer.step(self._context)  # type: ignore[no-untyped-call]


class TensorPipeRuntime(Runtime):
    """Calls to members of the same RPC world."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._workers = list(workers)

    def call(self, worker: int, function: str, *args: Any) -> Any:
        return rpc.rpc_sync(self._workers[worker], functions.FUNCTIONS[function], args=args)

    def start(self, worker: int, function: str, *args: Any) -> Callable[[], Any]:
        return cast(
            "Callable[[], Any]",
            rpc.rpc_async(self._workers[worker], functions.FUNCTIONS[function], args=args).wait,
        )

    def chain(self, x: Tensor) -> Tensor:
        return cast(Tensor, rpc.rpc_sync(self._workers[0], chain, args=(x, self._workers[1:])))

    def create(self, worker: int, module: str, *args: Any) -> Module:
        return RemoteModule(self._workers[worker], functions.MODULES[module], args)

    def optimizer(self, remote: Sequence[Module], local: Sequence[nn.Module], rate: float) -> Any:
        refs = [ref for module in cast("Sequence[RemoteModule]", remote) for ref in module.parameter_refs]
        refs += [rpc.RRef(parameter) for module in local for parameter in module.parameters()]
        return DistributedOptimizer(torch.optim.SGD, refs, lr=rate)  # type: ignore[no-untyped-call]

    @contextmanager
    def training_pass(self, optimizer: Any = None) -> Iterator[TrainingPass]:
        with dist_autograd.context() as context:
            yield DistributedPass(context, optimizer)

    def settle(self) -> None:
        settle()

    def close(self) -> None:
        leave()
