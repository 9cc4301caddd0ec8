"""`worker.traffic()` counts what really crosses."""

from __future__ import annotations

import torch
from tests.conftest import Workers

import gradwire as gw


def test_a_tensor_that_goes_and_comes_back_is_counted_both_ways(workers: Workers) -> None:
    x = torch.rand(1_000_000)
    with gw.connect(workers.a) as worker:
        before = worker.traffic()
        worker.same(x)
        after = worker.traffic()
    for there, size in ((after.sent - before.sent, x.nbytes), (after.received - before.received, x.nbytes)):
        assert size < there < 1.01 * size
    assert after.total == after.sent + after.received
