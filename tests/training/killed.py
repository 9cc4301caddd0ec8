"""Kills processes that save, at random points, and looks at what they left.

A script of its own: it loads torch once and forks, so that 30 processes are started and killed in seconds.
Nothing of gRPC or of autograd may run in the process that forks. Prints one JSON line with what was found.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

import gradwire as gw
from gradwire.training.snapshots import SnapshotReader, directory
from gradwire_server.state.directory import StateDirectory
from gradwire_server.worker import Worker

ROUNDS = 30
PATIENCE = 30.0
Report = Callable[[int], None]


@contextmanager
def forked(work: Callable[[Report], None]) -> Iterator[tuple[int, int]]:
    """Runs work in a process of its own; gives its id, and where its reports can be read."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            work(lambda number: os.write(writing, struct.pack("q", number)) and None)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        yield child, reading
    finally:
        os.close(reading)


def reports_until_killed(child: int, reading: int, delay: float) -> list[int]:
    """Waits for the first report, kills the process after a random while, and returns all reports."""
    ready, _, _ = select.select([reading], [], [], PATIENCE)
    first = os.read(reading, 8) if ready else b""
    if not first:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("the process ended, or did nothing, before it was killed")
    time.sleep(delay)  # not to wait for anything: this is the random point
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"it ended by itself: {status}"
    rest = b""
    while more := os.read(reading, 1 << 16):
        rest += more
    return [number for (number,) in struct.iter_unpack("q", first + rest)]


def was_saving(path: Path) -> bool:
    """Whether the killed process left something of a save behind."""
    return len(list(path.glob("data-*"))) > 1 or (path / "manifest.json.new").exists()


# -- gw.save


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(64, 512) for _ in range(8))


def make_model() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return model, optimizer


def tensors_of(model: Model, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]


def version_of(path: Path) -> int:
    model, optimizer = make_model()
    gw.load(path, model, optimizer)
    (value,) = {float(v) for t in tensors_of(model, optimizer) for v in t.detach().unique()}
    return int(value)


def kill_checkpoints(path: Path, chance: random.Random) -> dict[str, object]:
    directory.SHARD_BYTES = 500_000  # several files, so that there is something between them
    found = -1
    in_the_middle = 0
    for _ in range(ROUNDS):
        first = found + 1

        def save_again_and_again(report: Report, first: int = first) -> None:
            model, optimizer = make_model()
            for version in count(first):
                for tensor in tensors_of(model, optimizer):
                    tensor.detach().fill_(version)
                gw.save(path, model, optimizer)
                report(version)

        with forked(save_again_and_again) as (child, reading):
            reports = reports_until_killed(child, reading, chance.uniform(0.0, 0.03))
        in_the_middle += was_saving(path)
        found = version_of(path)
        # The last one that was done, or the next, if it was killed just before it could say so.
        assert found in (reports[-1], reports[-1] + 1), (found, reports[-1])
    return {"rounds": ROUNDS, "in_the_middle": in_the_middle, "versions": found}


# -- the worker's state directory


class Counter(torch.nn.Module):
    """Each step of SGD with lr and momentum 1 on the loss adds n to all elements the n-th time."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(64, 256, dtype=torch.float64) for _ in range(4))

    def forward(self) -> torch.Tensor:
        return -torch.stack([part.sum() for part in self.parts]).sum()


def steps_of(path: Path) -> tuple[int, str]:
    """How many steps the saved state has, and the id of the optimizer. Parameters and momentum must agree."""
    with SnapshotReader(path, "state") as snapshot:
        objects = {entry["name"]: entry for entry in snapshot.get(snapshot.state["objects"], copy=True)}
        optimizers = snapshot.get(snapshot.state["optimizers"], copy=True)
    if "counter" not in objects:
        return 0, ""  # killed before it was made
    parameters = {float(v) for part in objects["counter"]["state"].values() for v in part.unique()}
    if not optimizers:
        assert parameters == {0.0}, parameters
        return 0, ""
    (optimizer,) = optimizers
    buffers = [state["momentum_buffer"] for state in optimizer["state"]["state"].values()]
    steps = {-float(v) for buffer in buffers for v in buffer.unique()} or {0.0}
    assert len(steps) == 1, f"buffers of several steps: {steps}"
    (made,) = steps
    assert parameters == {made * (made + 1) / 2}, f"{parameters} after {made} steps"
    return int(made), optimizer["uid"]


def kill_workers(path: Path, chance: random.Random) -> dict[str, object]:
    steps, uid = 0, ""
    in_the_middle = 0
    for _ in range(ROUNDS):

        def train(report: Report, steps: int = steps, uid: str = uid) -> None:
            made = steps
            save = StateDirectory.save

            def reporting_save(state: StateDirectory) -> bool:
                before = made  # what is saved is this, or later
                done = save(state)
                if done and before > steps:
                    report(before)
                return done

            StateDirectory.save = reporting_save  # type: ignore[method-assign]
            with Worker(Counter, state_dir=path, save_every=0.001) as worker:
                handle = gw.connect(worker.address)
                there = [stored.name for stored in worker._objects.named()]
                counter = handle.get("counter") if there else handle.create("Counter", name="counter")
                value = float(counter.state_dict()["parts.0"][0, 0])
                assert value == steps * (steps + 1) / 2, f"restored {value}, expected {steps} steps"
                optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [counter], lr=1.0, momentum=1.0)
                if uid:
                    # This is another trainer; it says that it is the one that was killed.
                    optimizer._remote[0]._uid = uid
                    optimizer._remote[0].start_creating(resume=True)()
                while True:
                    optimizer.zero_grad()
                    counter().backward()
                    optimizer.step()
                    made += 1

        with forked(train) as (child, reading):
            reports = reports_until_killed(child, reading, chance.uniform(0.0, 0.15))
        in_the_middle += was_saving(path)
        before = steps
        steps, found_uid = steps_of(path)
        assert steps >= max(before, reports[-1]), (steps, before, reports[-1])
        uid = found_uid or uid
    return {"rounds": ROUNDS, "in_the_middle": in_the_middle, "versions": steps}


def warm_up() -> None:
    """Has torch import what it only imports when it is first used, which takes a second in each process."""
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], momentum=0.5).step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm_up()
    scenario = {"checkpoints": kill_checkpoints, "workers": kill_workers}[sys.argv[1]]
    print(json.dumps(scenario(Path(sys.argv[2]), random.Random(int(sys.argv[3])))))
