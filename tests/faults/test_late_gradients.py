"""What is left of a backward that is over does no harm."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.test_deaths import LOST_AFTER, SERVED, wait_for
from tests.integration.conftest import Launch

import gradwire as gw
import gradwire_server as gws
from gradwire.peers.current import default_peer
from gradwire.proto.v1 import link_pb2
from gradwire.transport import ResponseFuture

MIDDLE = (
    SERVED
    + """
@gws.expose
def then_block(address, x, marker):
    return Blocking.apply(gw.connect(address, lost_after=30.0).scale(x), marker)

@gws.expose
def gradient():
    found = gw.current_context().gradients()
    return found.get(weight)

@gws.expose
def forget():
    gw.current_context().zero_grad()
"""
)


@pytest.mark.timeout(200)
def test_a_worker_that_wakes_up_cannot_add_to_a_pass_that_is_over(launch: Launch, tmp_path: Path) -> None:
    middle, last = launch(MIDDLE), launch(MIDDLE)
    marker = tmp_path / "marker"
    worker = gw.connect(middle.address, lost_after=LOST_AFTER)
    end = gw.connect(last.address)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss = worker.then_block(last.address, x, str(marker)).sum()

    def backward() -> str:
        try:
            loss.backward()
        except gw.WorkerLost as error:
            return str(error)
        return ""

    # The middle is stopped inside its backward, before it has propagated to the last.
    running = default_peer().pool.submit(backward)
    wait_for(marker.exists, "the backward in the middle")
    middle.signal(signal.SIGSTOP)
    assert middle.address in running.result(60)
    # A step that goes around it: what the last holds from now on is this step's alone.
    end.forget()
    end.scale(x).sum().backward()
    expected = end.gradient()
    assert torch.equal(expected, torch.ones(3).double())
    # It wakes up, finds that nobody waits for it any more, and goes on to the last worker or not.
    middle.signal(signal.SIGCONT)
    with gw.connect(middle.address, lost_after=60.0) as awake:
        wait_for(lambda: awake.inspect().calls == 0, "the middle being done")
        wait_for(lambda: all(not c.results for c in awake.inspect().contexts), "the middle letting go")
    assert torch.equal(end.gradient(), expected)


def test_gradients_of_a_pass_that_is_over_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with gws.Worker(double) as served, gw.connect(served.address) as worker:
        link = worker._link
        asked: list[bytes] = []
        send_request = link.send_request

        def remember(method: int, body: bytes, *args: Any, **kwargs: Any) -> ResponseFuture:
            if method == link_pb2.METHOD_PROPAGATE_GRADIENTS:
                asked.append(body)
            return send_request(method, body, *args, **kwargs)

        monkeypatch.setattr(link, "send_request", remember)
        x = torch.ones(3, requires_grad=True)
        loss = worker.double(x).sum()
        loss.backward(retain_graph=True)
        assert len(asked) == 1
        # Until the worker hears of it with the next call, it cannot know.
        worker.double(x)
        with pytest.raises(gw.NotFound, match="is over"):
            send_request(link_pb2.METHOD_PROPAGATE_GRADIENTS, asked[0]).result(60)
