"""Graph tasks whose nodes run on several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gradwire import wire
from gradwire.autograd import (
    AutogradMessageId,
    AutogradMetadata,
    ContextId,
    DistEngine,
    graph_tasks,
    receive_call,
)
from gradwire.proto.v1 import autograd_pb2, tensor_pb2


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

    monkeypatch.setattr(graph_tasks, "current_run", lambda: None)
    monkeypatch.setattr(graph_tasks, "wants_all_leaves", all_leaves_wanted)
    monkeypatch.setattr(graph_tasks, "current_graph_task_id", lambda: 77)
    monkeypatch.setattr(graph_tasks, "graph_task_keeps_graph", lambda: True)
    monkeypatch.setattr(graph_tasks, "queue_callback", callbacks.append)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: graph_tasks.current_task(), range(2))
    assert one is other
    assert len(callbacks) == 1
    one.finish()


def test_what_is_left_of_a_backward_that_is_over_adds_nothing() -> None:
    """A run may end after its caller has caught the error, cleared the gradients and begun anew."""
    engine = DistEngine(1, lambda peer: None)
    leaf = torch.ones(2, requires_grad=True)
    context, old, new = ContextId(7, 0, 1), AutogradMessageId(7, 3, 1), AutogradMessageId(7, 4, 1)
    call = autograd_pb2.AutogradMetadata(oldest_pass=4)
    context.write(call.context)
    late, current = (graph_tasks.BackwardRun(engine, id, context, 7, True, None) for id in (old, new))
    engine.accumulate(late, context, leaf, torch.ones(2))
    engine.container.get(context).clear_gradients()
    metadata = AutogradMetadata.parse(call)
    receive_call(engine, metadata, wire.Decoder(tensor_pb2.TensorTable(), []), None, "a call")
    engine.accumulate(late, context, leaf, torch.ones(2))
    assert engine.container.get(context).gradients() == {}
    engine.accumulate(current, context, leaf, torch.ones(2))
    assert torch.equal(engine.container.get(context).gradients()[leaf], torch.ones(2))
