"""How long it takes until there is a first result, in processes that have done nothing before."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.contenders import Contender, Kind
from benchmarks.daemons import serve
from benchmarks.members import START_SECONDS, Member, member, wait_for
from benchmarks.trainers import Trainer, Waiting, make_rank, make_trainer


class Newcomer:
    """A trainer that has not connected yet, or the worker of an RPC world that it connects with."""

    def __init__(self, make: Callable[..., Trainer | Waiting], *args: object) -> None:
        self._make = make
        self._args = args
        self._made: Trainer | Waiting | None = None

    def connect(self) -> float:
        """The seconds that it took."""
        begun = time.perf_counter()
        self._made = self._make(*self._args)
        return time.perf_counter() - begun

    def first_result(self, key: str) -> float:
        """The seconds until the first operation of a case has come to something, and to the right thing."""
        assert isinstance(self._made, Trainer)
        self._made.prepare(key)
        [seconds] = self._made.measure(key, 1)
        self._made.check(key)
        return seconds

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def start_times(contender: Contender) -> dict[str, float]:
    """Seconds, by case of row 16."""
    with ExitStack() as stack:
        measure = _start_of_gradwire if contender.kind is Kind.GRADWIRE else _start_of_tensorpipe
        return measure(contender, stack)


def _start_of_gradwire(contender: Contender, stack: ExitStack) -> dict[str, float]:
    begun = time.perf_counter()
    worker = stack.enter_context(serve(contender))
    address = worker.wait_until_ready()
    ready = time.perf_counter() - begun
    trainer = _newcomer(contender, stack, make_trainer, contender, [address])
    connected = trainer.send_request("connect")
    return {
        "16-daemon": ready,
        "16-connect": connected,
        "16-first": trainer.send_request("first_result", "16-first"),
    }


def _start_of_tensorpipe(contender: Contender, stack: ExitStack) -> dict[str, float]:
    """The worker is there and waits when the trainer begins."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-"))
    rendezvous, names = Path(folder, "rendezvous"), ["worker", "trainer"]
    worker, trainer = (
        _newcomer(contender, stack, make_rank, contender, rendezvous.as_uri(), names, rank, names[:1])
        for rank in range(2)
    )
    stack.callback(worker.begin_to_end)  # neither leaves before both want to
    worker.tell("connect")
    wait_for(
        lambda: rendezvous.exists() and rendezvous.stat().st_size > 0,
        START_SECONDS,
        "the worker did not come to the rendezvous",
    )
    connected = trainer.send_request("connect")
    worker.answer()
    return {"16-connect": connected, "16-first": trainer.send_request("first_result", "16-first")}


def _newcomer(contender: Contender, stack: ExitStack, *make_and_args: object) -> Member:
    label = f"{contender.name} newcomer"
    return stack.enter_context(member(label, Newcomer, *make_and_args, environment=contender.environment))
