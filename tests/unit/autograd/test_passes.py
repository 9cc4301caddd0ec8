"""Graph tasks whose nodes run on several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gradwire.autograd import passes


def test_threads_of_one_graph_task_share_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of several devices: each would wait at the end for what it sent itself, and only for that."""
    both_are_in = threading.Barrier(2)
    callbacks: list[Any] = []

    def all_leaves_wanted() -> bool:
        try:
            both_are_in.wait(1)
        except threading.BrokenBarrierError:
            pass  # the other thread waits for this one, as it should
        return True

    class Engine:
        queue_callback = staticmethod(callbacks.append)

    monkeypatch.setattr(passes, "current_run", lambda: None)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 77)
    monkeypatch.setattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Engine)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: passes.current_task(all_leaves_wanted), range(2))
    assert one is other
    assert len(callbacks) == 1
    one.finish()
