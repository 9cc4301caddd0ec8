"""A client that runs short of something while its links live: ``main`` runs in a process of its own.

Its arguments are of what, what carries its session, and a worker that serves `test_shortages.SERVED`.
"""

from __future__ import annotations

import sys

import pytest
import torch
from tests.faults.carriers import SETTINGS, carrier_of
from tests.faults.shortages import SHORTAGES
from tests.faults.test_shortages import LARGE, TOO_LARGE, check_calls

import gradwire as gw

__all__ = ["main"]


def main() -> None:
    torch.set_num_threads(1)
    short_of, carrier, address = sys.argv[1:]
    with gw.connect(address, lost_after=30.0, **SETTINGS[carrier]) as worker:
        check_calls(worker)
        assert carrier_of(worker._link) == carrier
        link = worker._link
        with SHORTAGES[short_of]():
            if short_of == "memory":
                with pytest.raises(gw.ResourceExhausted, match="no memory"):
                    worker.zeros(TOO_LARGE)
                assert worker.zeros(10).sum() == 0
            else:
                check_calls(worker, 8 * LARGE)
            if carrier == "unix":
                assert (carrier_of(link) == "unix") == (short_of != "descriptors")
        check_calls(worker)
        assert worker.zeros(LARGE).sum() == 0
        assert worker._link is link
        assert link.ended is None
    print("done", flush=True)
