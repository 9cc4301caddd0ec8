"""What a worker costs that has clients and nothing to do."""

from __future__ import annotations

import time

from benchmarks.cases import IDLE_CLIENTS
from benchmarks.contenders import Contender
from benchmarks.crowd import crowd
from benchmarks.daemons import serve
from benchmarks.processes import cpu_seconds_of, threads_of

SETTLING_SECONDS = 1.0
"""After which what connecting set off is over."""
WATCHED_SECONDS = 4.0


def idle_costs(contender: Contender) -> dict[str, float]:
    """Percent of a core and threads, by case of row 17."""
    with serve(contender) as worker, crowd(worker.wait_until_ready(), contender.carrier) as clients:
        clients.send_request("grow_to", IDLE_CLIENTS)
        time.sleep(SETTLING_SECONDS)
        begun, before = time.monotonic(), cpu_seconds_of(worker.pid)
        time.sleep(WATCHED_SECONDS)
        used = (cpu_seconds_of(worker.pid) - before) / (time.monotonic() - begun)
        return {"17-cpu": 100 * used, "17-threads": float(threads_of(worker.pid))}
