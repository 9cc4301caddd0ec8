"""What one thread of a client does: everything that users do, each time compared with the same done here."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.soak import served
from tests.soak.journal import Journal

import gradwire as gw
from gradwire.api.workers import RemoteWorker

__all__ = ["Load", "Mismatch", "Place"]

STEPS_AT_A_TIME = 4
STEPS_OF_A_MODEL = 24


class Mismatch(Exception):
    """A result is not what it should be."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Mismatch(what)


@dataclass(frozen=True)
class Place:
    """A worker, and how clients reach it."""

    index: int
    address: str
    largest_bytes: int
    """What can be sent with a fair chance that no fault comes in the middle of it."""


class Load:
    """Does one thing after another, as the seed decides."""

    def __init__(self, places: Sequence[Place], journal: Journal, seed: str, tokens: Iterator[int]) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(self._random.getrandbits(60))
        self._journal = journal
        self._tokens = tokens
        self._places = places
        self._workers: list[RemoteWorker] = gw.connect(
            [place.address for place in places],
            connect_timeout=served.LOST_AFTER,
            lost_after=served.LOST_AFTER,
        )
        self._training: _Training | None = None
        self._kinds: dict[Callable[[], dict[str, int]], int] = {
            self.call: 6,
            self.fan_out: 3,
            self.await_many: 2,
            self.large: 3,
            self.backward: 5,
            self.context: 3,
            self.chain: 3,
            self.train: 6,
            self.cancel: 2,
            self.time_out: 2,
            self.fail: 2,
            self.objects: 3,
        }

    def one(self) -> None:
        """Does something, and says in the journal what, and how it went."""
        (kind,) = self._random.choices(list(self._kinds), list(self._kinds.values()))
        started = time.monotonic()
        try:
            counts = kind()
        except BaseException:
            # One of the two models may be a step ahead now.
            self._training = None
            raise
        self._journal.did(kind.__name__, time.monotonic() - started, **counts)

    def close(self) -> None:
        if self._training is not None:
            self._training.check()
            self._training = None

    # -- what it does

    def call(self) -> dict[str, int]:
        at = self._anywhere()
        (token,) = tokens = self._begin(at, 1)
        check(self._workers[at].count(token) == 1, f"call {token} ran more than once")
        self._journal.done(tokens)
        return {"calls": 1}

    def fan_out(self) -> dict[str, int]:
        begun = [(at, self._begin(at, self._random.randint(5, 30))) for at in range(len(self._workers))]
        futures = [self._workers[at].call_async("count", token) for at, tokens in begun for token in tokens]
        check([future.result() for future in futures] == [1] * len(futures), "a call ran more than once")
        for _, tokens in begun:
            self._journal.done(tokens)
        return {"calls": len(futures)}

    def await_many(self) -> dict[str, int]:
        at = self._anywhere()
        tokens = self._begin(at, 10)

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(self._workers[at].call_async("count", token) for token in tokens))

        check(asyncio.run(all_of_them()) == [1] * 10, "a call ran more than once")
        self._journal.done(tokens)
        return {"calls": 10}

    def large(self) -> dict[str, int]:
        at = self._anywhere()
        size = self._random.randint(1, self._places[at].largest_bytes // 4)
        x = torch.randn(size, generator=self._generator)
        check(torch.equal(self._workers[at].echo(x), x), f"{size} floats came back changed")
        return {"calls": 1, "bytes of large tensors": 8 * size}

    def backward(self) -> dict[str, int]:
        """Two results of two workers, one of them used twice."""
        first, second = self._random.sample(self._workers, 2)
        a, b = self._factor(), self._factor()
        x = self._leaf()
        y = first.mix(x, a)
        (y * second.mix(y, b)).sum().backward()
        twin = x.detach().clone().requires_grad_()
        mixed = served.mix(twin, a)
        (mixed * served.mix(mixed, b)).sum().backward()
        check(torch.equal(_grad(x), _grad(twin)), "a gradient is not the local one")
        return {"calls": 2, "backwards": 1}

    def context(self) -> dict[str, int]:
        worker = self._workers[self._anywhere()]
        x = self._leaf()
        with gw.context() as ctx:
            ctx.backward(worker.weighted(x).sum())
            found, there = ctx.gradients()[x], worker.weight_gradient()
        twin, weight = (one.detach().clone().requires_grad_() for one in (x, served.weight))
        (twin * weight).cos().sum().backward()
        check(torch.equal(found, _grad(twin)), "a gradient of a context is not the local one")
        check(there is not None and torch.equal(there, _grad(weight)), "a worker's gradient is not the same")
        check(x.grad is None, "a context's backward touched .grad")
        return {"calls": 2, "backwards": 1}

    def chain(self) -> dict[str, int]:
        order = self._random.sample(range(len(self._workers)), self._random.randint(2, len(self._workers)))
        factors = [self._factor() for _ in order]
        x = self._leaf()
        addresses = [self._places[at].address for at in order[1:]]
        self._workers[order[0]].chain(x, factors, addresses).sum().backward()
        twin = x.detach().clone().requires_grad_()
        served.chain_locally(twin, factors).sum().backward()
        check(torch.equal(_grad(x), _grad(twin)), "a gradient through a chain is not the local one")
        return {"calls": len(order), "backwards": 1}

    def train(self) -> dict[str, int]:
        if self._training is None:
            self._training = _Training(self._random, self._workers, self._generator)
        for _ in range(STEPS_AT_A_TIME):
            self._training.step()
        counts = {"calls": 2 * STEPS_AT_A_TIME, "backwards": STEPS_AT_A_TIME, "steps": STEPS_AT_A_TIME}
        if self._training.steps >= STEPS_OF_A_MODEL:
            self._training.check()
            self._training = None
            counts["models trained and compared"] = 1
        return counts

    def cancel(self) -> dict[str, int]:
        first, *others = self._route()
        (token,) = self._begin(others[-1] if others else first, 1)
        future = self._workers[first].call_async("linger", token, [self._places[at].address for at in others])
        time.sleep(self._random.uniform(0, 0.2))
        check(future.cancel(), "a call that lingers was over already")
        return {"calls": 1, "cancelled": 1}

    def time_out(self) -> dict[str, int]:
        first, *others = self._route()
        (token,) = self._begin(others[-1] if others else first, 1)
        addresses = [self._places[at].address for at in others]
        seconds = self._random.uniform(0.05, 0.3)
        try:
            # The worker knows the deadline, too, and its answer may come just before the time is up here.
            was_cancelled = self._workers[first].call("linger", token, addresses, timeout=seconds)
            check(was_cancelled, f"a call that lingers came back within {seconds} s")
        except (gw.DeadlineExceeded, gw.ResourceExhausted):
            pass  # the second: there was no room in that time
        return {"calls": 1, "timed out": 1}

    def fail(self) -> dict[str, int]:
        at = self._anywhere()
        worker = self._workers[at]
        tokens = self._begin(at, 1)
        message = f"as asked for by {tokens[0]}"
        _expect_value_error(lambda: worker.fail(tokens[0], message), message)
        self._journal.done(tokens)
        x = self._leaf()
        doomed = worker.fail_in_backward(x, message).sum()
        _expect_value_error(doomed.backward, message)
        return {"calls": 2, "raised": 2}

    def objects(self) -> dict[str, int]:
        worker = self._workers[self._anywhere()]
        adder = worker.create("Adder")
        numbers = [self._random.randint(1, 100) for _ in range(self._random.randint(1, 8))]
        for future in [adder.call_async("add", number) for number in numbers]:
            future.result()
        check(adder.add(0) == sum(numbers), "an object's calls were lost, or counted twice")
        x = self._leaf()
        kept = worker.remote("mix", x, 2.0)
        fetched = kept.fetch()
        layer = worker.create("Layer", self._random.randint(0, 1000))
        check(torch.equal(fetched, served.mix(x, 2.0)), "a value that was kept is not the local one")
        check(layer.num_parameters() == served.WIDTH * (served.WIDTH + 1), "a layer has lost parameters")
        if self._random.random() < 0.5:
            kept.delete()
        return {"calls": len(numbers) + 4, "objects": 3}

    # -- with what

    def _anywhere(self) -> int:
        return self._random.randrange(len(self._workers))

    def _route(self) -> list[int]:
        return self._random.sample(range(len(self._workers)), self._random.choice((1, 1, 2)))

    def _leaf(self) -> torch.Tensor:
        x = torch.randint(-3, 4, (3, served.WIDTH), generator=self._generator)
        return x.double().requires_grad_()

    def _factor(self) -> float:
        return float(self._random.randint(-3, 3))

    def _begin(self, at: int, how_many: int) -> list[int]:
        tokens = [next(self._tokens) for _ in range(how_many)]
        self._journal.begin(self._places[at].index, tokens)
        return tokens


class _Training:
    """A model in three parts, and the same in one process."""

    def __init__(
        self, chance: random.Random, workers: Sequence[RemoteWorker], generator: torch.Generator
    ) -> None:
        self._generator = generator
        self.steps = 0
        seeds = [chance.getrandbits(31) for _ in range(3)]
        places = chance.sample(workers, 2) if chance.random() < 0.7 else [chance.choice(workers)] * 2
        remote = [worker.create("Layer", seed) for worker, seed in zip(places, seeds[1:], strict=True)]
        self._model = torch.nn.Sequential(served.Layer(seeds[0]), *remote)
        self._twin = torch.nn.Sequential(*(served.Layer(seed) for seed in seeds))
        optimizer_class = chance.choice((torch.optim.SGD, torch.optim.Adam))
        options: dict[str, Any] = (
            {"lr": 0.05, "momentum": 0.9} if optimizer_class is torch.optim.SGD else {"lr": 0.01}
        )
        self._optimizer = gw.optim.DistributedOptimizer(optimizer_class, [self._model], **options)
        self._twin_optimizer = optimizer_class(self._twin.parameters(), **options)

    def step(self) -> None:
        x = torch.randn(8, served.WIDTH, dtype=torch.float64, generator=self._generator)
        y = torch.randn(8, served.WIDTH, dtype=torch.float64, generator=self._generator)
        losses = []
        for model, optimizer in ((self._model, self._optimizer), (self._twin, self._twin_optimizer)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        self.steps += 1
        check(losses[0] == losses[1], f"step {self.steps}: a loss of {losses[0]}, locally {losses[1]}")

    def check(self) -> None:
        """All parameters, bit for bit."""
        state, expected = self._model.state_dict(), self._twin.state_dict()
        check(len(state) == len(expected), "parameters are missing")
        for (name, value), right in zip(state.items(), expected.values(), strict=True):
            check(torch.equal(value, right), f"after {self.steps} steps {name} is not the local one")


def _grad(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


def _expect_value_error(act: Callable[[], object], message: str) -> None:
    try:
        act()
    except ValueError as error:
        check(message in str(error), f"another error came: {error}")
        check(isinstance(error, gw.RemoteError), "the error is not a remote one")
        return
    raise Mismatch("what raises there did not raise here")
