"""Dask: an actor on a worker process. Autograd does not reach through its calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from distributed import Client, LocalCluster
from torch import Tensor

from benchmarks.functions import FUNCTIONS
from benchmarks.peers.member import Call, run


class Worker:
    """Runs what it is asked to."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def call(self, function: str, x: Tensor) -> object:
        return FUNCTIONS[function](x)


@contextmanager
def connected() -> Iterator[Call]:
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        worker = client.submit(Worker, actor=True).result()
        yield lambda function, x: worker.call(function, x).result()


if __name__ == "__main__":
    run(connected)
