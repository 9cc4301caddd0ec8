"""How much memory a transfer takes beyond the tensors themselves."""

from __future__ import annotations

import time

from benchmarks.cases import Case
from benchmarks.members import ANSWER_SECONDS, MemberFailed
from benchmarks.processes import held_bytes
from benchmarks.worlds import World

SAMPLING_SECONDS = 0.002


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
