"""Ray: an actor. Autograd does not reach through its calls."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import torch
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
    # Read when Ray is imported. Without a token it makes one, and leaves it in the home directory.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update(token, RAY_USAGE_STATS_ENABLED="0")
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    try:
        worker = ray.remote(Worker).remote()
        yield lambda function, x: ray.get(worker.call.remote(function, x))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    run(connected)
