"""Curves of many processes: clients of one worker, and workers of one client."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

import gradwire as gw
import gradwire_server as gws
from benchmarks.crowd import crowd
from benchmarks.growth import served
from benchmarks.growth.base import Place
from benchmarks.members import member

__all__ = ["FanOut", "call_of_one_client", "connect_clients"]

HOSTS = 2
"""The processes that many workers share. As programs of their own they would need too much memory."""


def connect_clients(place: Place, count: int) -> ExitStack:
    """All clients but the one that the step is of. They have made a call and ask for nothing more."""
    with ExitStack() as stack:
        clients = stack.enter_context(crowd(place.addresses[0]))
        clients.send_request("grow_to", count - 1)
        return stack.pop_all()


def call_of_one_client(place: Place, count: int) -> float:
    """A small call beside clients that are idle."""
    x = torch.arange(16.0)
    begun = time.perf_counter()
    result = place.worker.echo(x)
    seconds = time.perf_counter() - begun
    assert torch.equal(result, x)
    return seconds


class Host:
    """Some workers in one process."""

    def __init__(self, count: int) -> None:
        self._workers = [gws.Worker(served.scale) for _ in range(count)]
        for worker in self._workers:
            worker.start()

    def addresses(self) -> list[str]:
        return [worker.address for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


class FanOut:
    """A call to each of many workers at once, by one client."""

    def __init__(self) -> None:
        self._workers: list[gw.RemoteWorker] = []

    def connect(self, place: Place, count: int) -> ExitStack:
        """Starts so many workers, and connects to them."""
        with ExitStack() as stack:
            hosts = [
                stack.enter_context(member("workers", Host, len(range(index, count, HOSTS))))
                for index in range(HOSTS)
            ]
            addresses = [address for host in hosts for address in host.send_request("addresses")]
            self._workers = gw.connect(addresses)
            for worker in self._workers:
                stack.callback(worker.close)
            return stack.pop_all()

    def step(self, place: Place, count: int) -> float:
        x = torch.arange(16.0)
        expected = torch.tanh(x)
        begun = time.perf_counter()
        futures = [worker.call_async("scale", x) for worker in self._workers]
        results = [future.result() for future in futures]
        seconds = time.perf_counter() - begun
        assert len(results) == count
        assert all(torch.equal(result, expected) for result in results)
        return seconds
