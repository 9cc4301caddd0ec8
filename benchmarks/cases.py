"""The rows of the benchmark: each is written once, for any contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.contenders import (
    GRADWIRE,
    GRADWIRE_TCP,
    LOCAL,
    TENSORPIPE,
    TENSORPIPE_HUGEPAGES,
    TENSORPIPE_TCP,
    Contender,
)
from benchmarks.functions import MLP_WIDTH, WIDTH, TransformerLayers
from benchmarks.runtimes.base import Runtime

MEGABYTE = 1 << 20
IN_FLIGHT = 200
"""Calls that one client has in flight in row 4."""
CLIENTS = 8
CLIENT_IN_FLIGHT = 16
"""Calls that each of several clients has in flight in the second half of row 5."""
TRANSFER = 256
"""In megabytes, the transfer of rows 11 and 12."""
LAYERS, BATCH, TOKENS, VOCABULARY = 6, 16, 64, 1000
CROSSING_BYTES = 4 * BATCH * TOKENS * WIDTH
"""Of one activation of the transformer; four cross in a step: there and back, forward and backward."""

Outcome = Sequence[object]
"""What an operation comes to, results and gradients, to be compared with the same in one process."""
Operation = Callable[[], Outcome]


@dataclass(frozen=True)
class Topology:
    """The processes that a row needs."""

    trainers: int
    workers: int

    def or_more(self, other: Topology) -> Topology:
        """What is enough for both."""
        return Topology(max(self.trainers, other.trainers), max(self.workers, other.workers))


PAIR = Topology(trainers=1, workers=1)
THREE_WORKERS = Topology(trainers=1, workers=3)
EIGHT_CLIENTS = Topology(trainers=CLIENTS, workers=1)

SMALL = (GRADWIRE, TENSORPIPE, LOCAL)
PEERS = (GRADWIRE, TENSORPIPE)
MEDIUM = (GRADWIRE, TENSORPIPE, GRADWIRE_TCP, TENSORPIPE_TCP)
LARGE = (GRADWIRE, TENSORPIPE, GRADWIRE_TCP, TENSORPIPE_TCP, TENSORPIPE_HUGEPAGES)


@dataclass(frozen=True)
class Case:
    """One measured operation."""

    key: str
    row: int
    title: str
    make: Callable[[Runtime], Operation]
    """Prepares everything outside the measured time."""
    contenders: tuple[Contender, ...]
    topology: Topology = PAIR
    operations: int = 1
    """How many calls one operation makes; times are per call."""
    block: int = 20
    """Operations that are timed in one turn."""
    has_lead_in: bool = True
    """Whether each turn begins with one that is not timed; what takes a second needs none."""
    turns: int = 10
    background: Callable[[Runtime], Operation] | None = None
    """What another thread does over and over meanwhile."""
    checks: int = 2
    """How often its results are compared with one process: twice shows that parameters moved, and rightly."""
    group: str = ""
    """Cases of one group take turns with each other, too; else a case is a group of its own."""
    transferred: int = 0
    """Where memory is measured, not time: the bytes that cross, each into a tensor of its own there.

    Such a case has processes of its own, that have done nothing before.
    """
    size: int = 0
    """In megabytes, of cases that come in sizes."""
    is_quick: bool = True
    """Whether it is measured where there is little time."""


def small_call(runtime: Runtime) -> Operation:
    x = torch.arange(16.0)
    return lambda: [runtime.call(0, "echo", x)]


def small_backward(runtime: Runtime) -> Operation:
    x = torch.arange(16.0).div(16).requires_grad_()

    def operation() -> Outcome:
        with runtime.training_pass() as one:
            y = runtime.call(0, "scale", x)
            one.backward(y.sum())
            return [y, *one.gradients([x])]

    return operation


def small_training(runtime: Runtime) -> Operation:
    x = torch.arange(8.0 * MLP_WIDTH).sin().view(8, MLP_WIDTH)
    model = runtime.create(0, "Mlp", 3)
    optimizer = runtime.optimizer([model], [], 0.05)

    def operation() -> Outcome:
        with runtime.training_pass(optimizer) as one:
            loss = (model(x) - 0.5).square().mean()
            one.backward(loss)
            one.step()
            return [loss]

    return operation


def calls_in_flight(calls: int) -> Callable[[Runtime], Operation]:
    def make(runtime: Runtime) -> Operation:
        x = torch.arange(16.0)

        def operation() -> Outcome:
            waits = [runtime.start(0, "echo", x) for _ in range(calls)]
            return [wait() for wait in waits]

        return operation

    return make


def echo(megabytes: float) -> Callable[[Runtime], Operation]:
    def make(runtime: Runtime) -> Operation:
        x = _large(megabytes)
        return lambda: [runtime.call(0, "echo", x)]

    return make


def memory_copies(copied_bytes: int, copies: int) -> Callable[[Runtime], Operation]:
    """What the bytes of a row cost to copy into memory that is there already."""

    def make(_: Runtime) -> Operation:
        source, target = torch.ones(copied_bytes // 4), torch.zeros(copied_bytes // 4)

        def operation() -> Outcome:
            for _ in range(copies):
                target.copy_(source)
            return [target]

        return operation

    return make


def large_backward(megabytes: float) -> Callable[[Runtime], Operation]:
    def make(runtime: Runtime) -> Operation:
        x, weight = _large(megabytes).requires_grad_(), _large(megabytes)

        def operation() -> Outcome:
            with runtime.training_pass() as one:
                # Not the plain sum, whose gradient is one number seen through strides of 0.
                loss = torch.dot(runtime.call(0, "double", x), weight)
                one.backward(loss)
                return [loss, *one.gradients([x])]

        return operation

    return make


def many_backward(count: int, elements: int) -> Callable[[Runtime], Operation]:
    def make(runtime: Runtime) -> Operation:
        leaves = [torch.full((elements,), index / count).requires_grad_() for index in range(count)]

        def operation() -> Outcome:
            with runtime.training_pass() as one:
                results = runtime.call(0, "double_each", leaves)
                one.backward(torch.stack(results).square().sum())
                return [*results, *one.gradients(leaves)]

        return operation

    return make


def chain(runtime: Runtime) -> Operation:
    x = torch.arange(16.0).div(16).requires_grad_()

    def operation() -> Outcome:
        with runtime.training_pass() as one:
            y = runtime.chain(x)
            one.backward(y.sum())
            return [y, *one.gradients([x])]

    return operation


def fan_out(runtime: Runtime) -> Operation:
    leaves = [torch.full((16,), index / 8).requires_grad_() for index in range(8)]

    def operation() -> Outcome:
        with runtime.training_pass() as one:
            waits = [runtime.start(index % 2, "scale", leaf) for index, leaf in enumerate(leaves)]
            results = [wait() for wait in waits]
            one.backward(torch.stack(results).sum())
            return [*results, *one.gradients(leaves)]

    return operation


def transformer(runtime: Runtime) -> Operation:
    torch.manual_seed(10)
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    near = TransformerLayers(12, LAYERS // 2)
    far = runtime.create(0, "TransformerLayers", 13, LAYERS // 2)
    optimizer = runtime.optimizer([far], [embedding, near, head], 0.05)

    def operation() -> Outcome:
        with runtime.training_pass(optimizer) as one:
            logits = head(far(near(embedding(tokens))))
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            one.backward(loss)
            one.step()
            return [loss]

    return operation


def one_way(megabytes: int) -> Callable[[Runtime], Operation]:
    def make(runtime: Runtime) -> Operation:
        x = _large(megabytes)
        return lambda: [runtime.call(0, "consume", x)]

    return make


def _large(megabytes: float) -> Tensor:
    return torch.ones(int(megabytes * MEGABYTE) // 4)


def _sizes(row: int, title: str, make: Callable[[int], Callable[[Runtime], Operation]]) -> list[Case]:
    contenders = (*LARGE, LOCAL) if row == 7 else LARGE
    return [
        Case(
            f"{row}-{size}",
            row,
            f"{title}, {size} MB",
            make(size),
            contenders,
            block=block,
            has_lead_in=size <= 16,
            turns=turns,
            checks=checks,
            size=size,
            is_quick=size <= 64,
        )
        for size, block, turns, checks in ((1, 8, 12, 2), (16, 3, 10, 2), (64, 2, 8, 1), (256, 1, 8, 1))
    ]


def _copies(case: Case, copied_bytes: int, copies: int) -> Case:
    """The same bytes, copied in one process in turns with the case."""
    return replace(
        case,
        key=f"{case.key}-memcpy",
        title=f"{case.title}: its bytes copied",
        make=memory_copies(copied_bytes, copies),
        contenders=(LOCAL,),
        has_lead_in=True,
        group=case.key,
    )


_ALL = [
    Case("1", 1, "small call", small_call, SMALL, block=40, turns=16),
    Case("2", 2, "forward + backward, small function", small_backward, SMALL, block=30, turns=16),
    Case("3", 3, "forward + backward + step, small MLP", small_training, SMALL, block=30, turns=16),
    Case(
        "4",
        4,
        f"{IN_FLIGHT} calls in flight",
        calls_in_flight(IN_FLIGHT),
        PEERS,
        operations=IN_FLIGHT,
        block=2,
        turns=16,
    ),
    Case("5", 5, f"{CLIENTS} clients, a call at a time", small_call, PEERS, EIGHT_CLIENTS, block=60),
    Case(
        "5-in-flight",
        5,
        f"{CLIENTS} clients, {CLIENT_IN_FLIGHT} in flight each",
        calls_in_flight(CLIENT_IN_FLIGHT),
        PEERS,
        EIGHT_CLIENTS,
        operations=CLIENT_IN_FLIGHT,
        block=6,
    ),
    *_sizes(6, "echo", echo),
    *_sizes(7, "forward + backward", large_backward),
    Case("8", 8, "chain through 3 workers", chain, SMALL, THREE_WORKERS, turns=16),
    Case("9", 9, "fan-out to 8 on 2 workers", fan_out, SMALL, THREE_WORKERS, turns=16),
    Case("10", 10, "transformer step", transformer, SMALL, block=1, has_lead_in=False),
    Case("11-idle", 11, "small call, otherwise idle", small_call, PEERS, group="11", block=30, turns=8),
    Case(
        "11-busy",
        11,
        f"small call during {TRANSFER} MB transfers",
        small_call,
        PEERS,
        group="11",
        block=30,
        turns=8,
        background=one_way(TRANSFER),
    ),
    Case(
        "12-one-way",
        12,
        f"extra memory, {TRANSFER} MB one way",
        one_way(TRANSFER),
        (GRADWIRE, GRADWIRE_TCP, TENSORPIPE),
        turns=4,
        checks=1,
        transferred=TRANSFER * MEGABYTE,
        is_quick=False,
    ),
    Case(
        "12-echo",
        12,
        f"extra memory, {TRANSFER} MB there and back",
        echo(TRANSFER),
        (GRADWIRE, GRADWIRE_TCP, TENSORPIPE),
        turns=4,
        checks=1,
        transferred=2 * TRANSFER * MEGABYTE,
    ),
    *[
        Case(f"13-{key}", 13, title, make, MEDIUM, block=block, is_quick=False)
        for key, title, make, block in (
            ("echo-64k", "echo, 64 KB", echo(1 / 16), 20),
            ("echo-256k", "echo, 256 KB", echo(1 / 4), 20),
            ("64k", "forward + backward, 64 KB", large_backward(1 / 16), 20),
            ("256k", "forward + backward, 256 KB", large_backward(1 / 4), 20),
            ("many", "forward + backward, 100 tensors of 4 KB", many_backward(100, 1024), 4),
        )
    ],
]


def _with_copies(case: Case) -> list[Case]:
    """The cases that a plain copy of what crosses is of interest for have it beside them."""
    if case.row == 6:
        return [case, _copies(case, case.size * MEGABYTE, copies=2)]
    if case.row == 10:
        return [case, _copies(case, CROSSING_BYTES, copies=4)]
    return [case]


CASES = {case.key: case for one in _ALL for case in _with_copies(one)}
