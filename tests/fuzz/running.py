"""Runs inputs in a process of their own, and says which of them are findings.

A finding is an error that the target does not document, a process that ends, more than `CPU_SECONDS` of
computing for one input or none of it for `HANGS_AFTER` seconds, or memory beyond `memory_for` its size.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import mmap
import multiprocessing
import os
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.fuzz.inputs import Input, join, load_corpus, split
from tests.fuzz.target import Target

__all__ = ["FOUND", "Finding", "Outcome", "fuzz", "made", "replay"]

FOUND = Path(__file__).parents[2] / "build" / "fuzz"
"""Where inputs go that are findings."""
CPU_SECONDS = 5.0
HANGS_AFTER = 120.0
"""Seconds of the clock: other processes may have the processors."""
SPARE_BYTES = 96 << 20
"""What a process may take more after its first inputs, whatever they are: allocators, caches."""
BYTES_PER_BYTE = 2000
"""A field of a few bytes becomes an object of Python, or a tensor."""
_GUARD_BYTES = 2 << 30
"""Beyond what may be taken: there the system refuses memory, so that the machine is not harmed."""
_MOST_FINDINGS = 20
_POLL_SECONDS = 0.05


def memory_for(size: int) -> int:
    """How much memory an input of a size may take."""
    return SPARE_BYTES + BYTES_PER_BYTE * size


@dataclass(frozen=True)
class Finding:
    target: str
    what: str
    """In one line; the same for findings of the same cause, as far as that can be told."""
    details: str
    path: Path | None

    def __str__(self) -> str:
        place = "" if self.path is None else os.path.relpath(self.path)
        rerun = f"\n    again: python -m tests.fuzz --target {self.target} {place}" if place else ""
        return f"FOUND in {self.target}: {self.what}{rerun}\n{self.details}"


@dataclass
class Outcome:
    """What came of the inputs of one target."""

    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)


def made(target: Target, corpus: list[Input], seed: int, index: int) -> Input:
    """The input of a number: first the corpus as it is, then ever other changes of it."""
    if index < len(corpus):
        return corpus[index]
    random = Random(f"{seed} {target.name} {index}")
    return target.mutate(random, random.choice(corpus), random.choice(corpus))


def fuzz(
    target: type[Target],
    *,
    seed: int = 0,
    inputs: int | None = None,
    seconds: float = float("inf"),
    tell: Callable[[Finding], object] = print,
) -> Outcome:
    """Runs as many inputs, or for as long. Each kind of finding is told once."""
    corpus = load_corpus(target.name)
    if not corpus:
        raise FileNotFoundError(
            f"there is no corpus for {target.name}: run python -m tests.fuzz --make-corpus"
        )
    numbers = range(inputs) if inputs is not None else itertools.count()
    return _run(target, lambda made_by, index: made(made_by, corpus, seed, index), numbers, seconds, tell)


def replay(target: type[Target], paths: list[Path], tell: Callable[[Finding], object] = print) -> Outcome:
    """Runs inputs of files."""
    contents = [split(path.read_bytes()) for path in paths]
    return _run(target, lambda _, index: contents[index], range(len(contents)), float("inf"), tell)


Make = Callable[[Target, int], Input]


def _run(
    target: type[Target],
    make: Make,
    numbers: Any,
    seconds: float,
    tell: Callable[[Finding], object],
) -> Outcome:
    """Has processes run the inputs. One that ends, or hangs, is followed by another one."""
    outcome = Outcome()
    known: set[str] = set()

    def report(what: str, details: str, content: bytes | None) -> None:
        if what not in known:
            known.add(what)
            outcome.findings.append(_found(target.name, what, details, content))
            tell(outcome.findings[-1])

    started = time.monotonic()
    end = started + seconds
    last = numbers[-1] + 1 if isinstance(numbers, range) and numbers else None
    first = 0
    processes = 0
    while time.monotonic() < end and (last is None or first < last) and processes < _MOST_FINDINGS:
        processes += 1
        board, queue = _Board(), multiprocessing.get_context("fork").SimpleQueue()
        process = _Process(partial(_work, target, make, first, last, end, board, queue, frozenset(known)))
        is_hanging = _watch(process, board, queue, report)
        if process.exitcode == 1:
            raise AssertionError("making or judging an input failed: see above")
        if is_hanging or process.exitcode != 0:
            what = f"hangs for {HANGS_AFTER:g} s" if is_hanging else _exit(process.exitcode)
            report(what, "", board.content())
        index, done, accepted = board.progress()
        outcome.inputs += done
        outcome.accepted += accepted
        first = index + 1
    outcome.seconds = time.monotonic() - started
    return outcome


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ends the process: {signal.Signals(-code).name}"
    return f"ends the process with exit code {code}"


def _found(target: str, what: str, details: str, content: bytes | None) -> Finding:
    path = None
    if content is not None:
        FOUND.mkdir(parents=True, exist_ok=True)
        path = FOUND / f"{target}-{hashlib.sha256(content).hexdigest()[:12]}"
        path.write_bytes(content)
    return Finding(target, what, details, path)


def _watch(process: _Process, board: _Board, queue: Any, report: Callable[..., None]) -> bool:
    """Waits for the end of a process, and passes on what it finds. Kills it and returns True if it hangs."""

    def take() -> None:
        while not queue.empty():
            report(*queue.get())

    seen, since = None, time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        take()
        now = board.progress()
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > HANGS_AFTER:
            process.kill(signal.SIGABRT)  # it writes to its standard error what it was doing
            give_up_at = time.monotonic() + 10.0
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                if time.monotonic() >= give_up_at:
                    process.kill(signal.SIGKILL)
            return True
    take()
    return False


class _Process:
    """A fork of this process. Not of multiprocessing, whose daemons may have no children."""

    def __init__(self, work: Callable[[], None]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.exitcode: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)

    def poll(self) -> int | None:
        if self.exitcode is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.exitcode = os.waitstatus_to_exitcode(status)
        return self.exitcode

    def kill(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)


class _Board:
    """What a process does, in memory that outlives it."""

    _HEAD = struct.Struct("<QQQQ")
    _BYTES = 8 << 20

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._BYTES)

    def begin(self, index: int, done: int, accepted: int, content: bytes) -> None:
        content = content[: self._BYTES - self._HEAD.size]
        self._memory[: self._HEAD.size] = self._HEAD.pack(index, done, accepted, len(content))
        self._memory[self._HEAD.size : self._HEAD.size + len(content)] = content

    def progress(self) -> tuple[int, int, int]:
        index, done, accepted, _ = self._HEAD.unpack(self._memory[: self._HEAD.size])
        return index, done, accepted

    def content(self) -> bytes:
        size = self._HEAD.unpack(self._memory[: self._HEAD.size])[3]
        return self._memory[self._HEAD.size : self._HEAD.size + size]


# -- in the process


def _work(
    target_type: type[Target],
    make: Make,
    first: int,
    last: int | None,
    end: float,
    board: _Board,
    queue: Any,
    known: frozenset[str],
) -> None:
    import faulthandler
    import logging

    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    target = target_type()
    reported = set(known)
    accepted = 0
    limits: _Limits | None = None
    for done, index in enumerate(_numbers(first, last, end), start=1):
        content = make(target, index)
        encoded = join(content)
        board.begin(index, done - 1, accepted, encoded)
        if limits is None:  # with the first input, which is of the corpus: what it loads stays
            _attempt(target, content)
            limits = _Limits()
        limits.begin(len(encoded))
        error = _attempt(target, content)
        accepted += error is None
        found = _unexpected(target, error) or limits.exceeded(len(encoded))
        del error
        if found is not None and found[0] not in reported:  # told once, however many inputs lead there
            reported.add(found[0])
            queue.put((*found, encoded))
        board.begin(index, done, accepted, encoded)
        if len(reported) >= _MOST_FINDINGS:
            break
    if limits is not None:
        grown = limits.grown()
        if grown is not None:
            queue.put((grown, "", None))


def _numbers(first: int, last: int | None, end: float) -> Iterator[int]:
    parent = os.getppid()
    for index in itertools.count(first):
        if index == last or time.monotonic() >= end or os.getppid() != parent:
            return
        yield index


def _attempt(target: Target, parts: Input) -> BaseException | None:
    try:
        target.run(parts)
    except BaseException as error:
        return error
    return None


def _unexpected(target: Target, error: BaseException | None) -> tuple[str, str] | None:
    """What is wrong about an error; None if the target may raise it."""
    if error is None or isinstance(error, target.refuses):
        return None
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/gradwire" in frame.filename and "/fuzz/" not in frame.filename]
    place = (own or frames)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}, in {place.name}"
    message = str(error).splitlines() or [""]
    details = "".join(traceback.format_exception(error)[-12:])
    # Frames of an error refer to all that it had in hand.
    traceback.clear_frames(error.__traceback__)
    kind = type(error).__name__
    if kind == "Fault":
        raised = [line.strip() for line in details.splitlines() if line.strip().startswith("File ")]
        return f"{message[0][:60].split(':')[0]}: {raised[-1] if raised else where}", details[-6000:]
    return f"{kind} at {where}", details[-6000:]


class _Limits:
    """What one input may cost."""

    def __init__(self) -> None:
        gc.collect()
        self._resident = _resident()
        self._peak = _peak()
        self._data = _data()

    def begin(self, size: int) -> None:
        limit = self._data + memory_for(size) + _GUARD_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
        self._peak = _peak()
        self._now = _resident()
        self._cpu = time.process_time()

    def exceeded(self, size: int) -> tuple[str, str] | None:
        """What is wrong about what the last input has cost."""
        cpu = time.process_time() - self._cpu
        taken = _peak() - max(self._peak, self._now)
        if taken > memory_for(size):
            return "takes much memory", f"{taken >> 20} MiB for {size} bytes"
        if cpu > CPU_SECONDS:
            return "takes long", f"{cpu:.1f} s of computing for {size} bytes"
        return None

    def grown(self) -> str | None:
        """What is wrong about what all inputs together have left behind."""
        gc.collect()
        grown = _resident() - self._resident
        return f"the process grew by {grown >> 20} MiB" if grown > SPARE_BYTES else None


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _data() -> int:
    return int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("processes are limited and watched as Linux does it")
