"""How much memory a transfer takes beyond the tensors themselves."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.members import ANSWER_SECONDS, MemberFailed
from benchmarks.worlds import World

SAMPLING_SECONDS = 0.002
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def extra_memory(case: Case, world: World, repetitions: int) -> list[float]:
    """The peak of extra bytes per transferred byte, both sides together, of each of some transfers.

    What is held before the first transfer, the source among it, does not count, and neither do the tensors
    that arrive. Buffers that are kept for the next transfer do.
    """
    [trainer] = world.trainers
    trainer.send_request("prepare", case.key)
    before = held_bytes(world.pids)
    found = []
    for _ in range(repetitions):
        peak = 0
        trainer.tell("do", case.key)
        give_up_at = time.monotonic() + ANSWER_SECONDS
        while not trainer.has_answered(SAMPLING_SECONDS):
            peak = max(peak, held_bytes(world.pids) - before)
            if time.monotonic() > give_up_at:
                raise MemberFailed(f"{world.contender.name} did not transfer within {ANSWER_SECONDS:g} s")
        trainer.answer()
        found.append((peak - case.transferred) / case.transferred)
    return found


def held_bytes(pids: list[int]) -> int:
    """What processes hold in memory of their own and in shared memory.

    The proportional set size: a page that two processes map counts half in each, so that shared memory
    counts once in the sum. Mapped files, which are code here, are left out.
    """
    return sum(_proportional_bytes(pid) for pid in pids)


def _proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_COUNTED))
