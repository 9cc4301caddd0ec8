"""The rows of the benchmark, and who is measured in each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from benchmarks import operations
from benchmarks.contenders import (
    GRADWIRE,
    GRADWIRE_GRPC,
    GRADWIRE_TCP,
    LOCAL,
    TENSORPIPE,
    TENSORPIPE_HUGEPAGES,
    TENSORPIPE_TCP,
    Contender,
)
from benchmarks.operations import MEGABYTE, Preparation

IN_FLIGHT = 200
"""Calls that one client has in flight in row 4."""
CLIENTS = 8
CLIENT_IN_FLIGHT = 16
"""Calls that each of several clients has in flight in the second half of row 5."""
TRANSFER = 256
"""In megabytes, the transfer of rows 11 and 12."""
LARGE_FROM = 16
"""The size in megabytes from which on huge pages make a difference."""
IDLE_CLIENTS = 100
"""Who are connected and ask for nothing in row 17."""


@dataclass(frozen=True)
class Topology:
    """The processes that a row needs."""

    trainers: int
    workers: int

    def or_more(self, other: Topology) -> Topology:
        """What is enough for both."""
        return Topology(max(self.trainers, other.trainers), max(self.workers, other.workers))


class Method(Enum):
    """How a case is measured."""

    IN_TURNS = "operations, in turns with other contenders"
    MEMORY = "the memory that a transfer takes"
    START = "how long it takes until there is a first result"
    IDLE = "what a worker costs that has nothing to do"


class Unit(Enum):
    """Of what is measured."""

    SECONDS = "seconds per call"
    BYTES = "extra bytes per byte"
    PERCENT = "percent of a core"
    THREADS = "threads"


PAIR = Topology(trainers=1, workers=1)
THREE_WORKERS = Topology(trainers=1, workers=3)
EIGHT_CLIENTS = Topology(trainers=CLIENTS, workers=1)

OURS = (GRADWIRE, GRADWIRE_TCP, GRADWIRE_GRPC)
BOTH = (*OURS, TENSORPIPE, TENSORPIPE_TCP)
ALL = (*BOTH, LOCAL)


@dataclass(frozen=True)
class Case:
    """One measured operation."""

    key: str
    row: int
    title: str
    make: Preparation
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
    background: Preparation | None = None
    """What another thread does over and over meanwhile."""
    before: Preparation | None = None
    """What is done before each operation, outside the measured time."""
    checks: int = 2
    """How often its results are compared with one process: twice shows that parameters moved, and rightly."""
    group: str = ""
    """Cases of one group take turns with each other, too; else a case is a group of its own."""
    method: Method = Method.IN_TURNS
    """Those that are not measured in turns have processes of their own, that have done nothing before."""
    unit: Unit = Unit.SECONDS
    transferred: int = 0
    """Where memory is measured: the bytes that cross, each into a tensor of its own there."""
    size: float = 0
    """In megabytes, of cases that come in sizes."""
    is_quick: bool = True
    """Whether it is measured where there is little time."""


def shown_size(megabytes: float) -> str:
    """As in 64KB."""
    return f"{megabytes:g}MB" if megabytes >= 1 else f"{1024 * megabytes:g}KB"


def _sizes(row: int) -> list[Case]:
    title, make = {
        6: ("echo", operations.echo),
        7: ("forward + backward", operations.large_backward),
    }[row]
    return [
        Case(
            f"{row}-{shown_size(size)}",
            row,
            f"{title}, {shown_size(size)}",
            make(size),
            (
                *BOTH,
                *([TENSORPIPE_HUGEPAGES] if size >= LARGE_FROM else []),
                *([LOCAL] if row == 7 else []),
            ),
            block=block,
            has_lead_in=size <= LARGE_FROM,
            turns=turns,
            checks=checks,
            size=size,
            is_quick=size <= 64,
        )
        for size, block, turns, checks in (
            *((1 / 16, 20, 10, 2), (1 / 4, 20, 10, 2), (1, 8, 12, 2)),
            *((16, 3, 10, 2), (64, 2, 8, 1), (256, 1, 8, 1)),
        )
    ]


def _many(count: int, megabytes: float, block: int) -> list[Case]:
    what = f"{count} tensors of {shown_size(megabytes)}"
    return [
        Case(
            f"13-{kind}-{count}x{shown_size(megabytes)}",
            13,
            f"{title}, {what}",
            make(count, megabytes),
            BOTH,
            block=block,
        )
        for kind, title, make in (
            ("echo", "echo", operations.many_echo),
            ("backward", "forward + backward", operations.many_backward),
        )
    ]


def _small(
    row: int, what: str, *, background: Preparation | None = None, before: Preparation | None = None
) -> list[Case]:
    """A small call, and a small forward and backward, in circumstances."""
    return [
        Case(
            f"{row}-{kind}",
            row,
            f"{title} {what}",
            make,
            BOTH,
            block=10,
            turns=8,
            background=background,
            before=before,
        )
        for kind, title, make in (
            ("call", "small call", operations.small_call),
            ("backward", "forward + backward", operations.small_backward),
        )
    ]


def _copies(case: Case, copied_bytes: int, copies: int) -> Case:
    """The same bytes, copied in one process in turns with the case."""
    return replace(
        case,
        key=f"{case.key}-memcpy",
        title=f"{case.title}: its bytes copied",
        make=operations.memory_copies(copied_bytes, copies),
        contenders=(LOCAL,),
        has_lead_in=True,
        group=case.key,
    )


_ALL = [
    Case("1", 1, "small call", operations.small_call, ALL, block=40, turns=16),
    Case("2", 2, "forward + backward, small function", operations.small_backward, ALL, block=30, turns=16),
    Case("3", 3, "forward + backward + step, small MLP", operations.small_training, ALL, block=30, turns=16),
    Case(
        "4",
        4,
        f"{IN_FLIGHT} calls in flight",
        operations.calls_in_flight(IN_FLIGHT),
        BOTH,
        operations=IN_FLIGHT,
        block=2,
        turns=16,
    ),
    Case(
        "5", 5, f"{CLIENTS} clients, a call at a time", operations.small_call, BOTH, EIGHT_CLIENTS, block=60
    ),
    Case(
        "5-in-flight",
        5,
        f"{CLIENTS} clients, {CLIENT_IN_FLIGHT} in flight each",
        operations.calls_in_flight(CLIENT_IN_FLIGHT),
        BOTH,
        EIGHT_CLIENTS,
        operations=CLIENT_IN_FLIGHT,
        block=6,
    ),
    *_sizes(6),
    *_sizes(7),
    Case("8", 8, "chain through 3 workers", operations.chain, ALL, THREE_WORKERS, turns=16),
    Case("9", 9, "fan-out to 8 on 2 workers", operations.fan_out, ALL, THREE_WORKERS, turns=16),
    Case(
        "10",
        10,
        "transformer step",
        operations.transformer,
        (GRADWIRE, TENSORPIPE, LOCAL),
        block=1,
        has_lead_in=False,
    ),
    *[
        Case(
            f"11-{kind}",
            11,
            f"small call{circumstances}",
            operations.small_call,
            BOTH,
            group="11",
            block=30,
            turns=8,
            background=background,
        )
        for kind, circumstances, background in (
            ("idle", ", otherwise idle", None),
            ("busy", f" during {TRANSFER}MB transfers", operations.one_way(TRANSFER)),
        )
    ],
    *[
        Case(
            f"12-{kind}",
            12,
            f"extra memory, {TRANSFER}MB {way}",
            make(TRANSFER),
            BOTH,
            turns=4,
            checks=1,
            method=Method.MEMORY,
            unit=Unit.BYTES,
            transferred=crossings * TRANSFER * MEGABYTE,
            is_quick=kind == "echo",
        )
        for kind, way, make, crossings in (
            ("one-way", "one way", operations.one_way, 1),
            ("echo", "there and back", operations.echo, 2),
        )
    ],
    *_many(100, 1 / 256, block=4),
    *_many(20, 1 / 4, block=4),
    *_small(14, "beside a busy Python thread", background=operations.busy_thread),
    *_small(15, "with cold caches", before=operations.cold_caches),
    *[
        Case(
            f"16-{kind}",
            16,
            title,
            operations.small_call,
            contenders,
            has_lead_in=False,
            turns=6,
            method=Method.START,
        )
        for kind, title, contenders in (
            ("daemon", "start-up of a daemon until it is ready", (GRADWIRE,)),
            ("connect", "connecting", BOTH),
            ("first", "first result after connecting", BOTH),
        )
    ],
    *[
        Case(
            f"17-{kind}",
            17,
            f"{title} of an idle worker with {IDLE_CLIENTS} clients",
            operations.small_call,
            OURS,
            turns=2,
            method=Method.IDLE,
            unit=unit,
        )
        for kind, title, unit in (("cpu", "CPU", Unit.PERCENT), ("threads", "threads", Unit.THREADS))
    ],
]


def _with_copies(case: Case) -> list[Case]:
    """The cases that a plain copy of what crosses is of interest for have it beside them."""
    if case.row == 6:
        return [case, _copies(case, int(case.size * MEGABYTE), copies=2)]
    if case.row == 10:
        return [case, _copies(case, operations.CROSSING_BYTES, copies=4)]
    return [case]


CASES = {case.key: case for one in _ALL for case in _with_copies(one)}
