"""What nobody refers to any more is let go of by the worker, also if it could not be told for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from tests.faults.proxy import FaultyProxy
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE

import gradwire as gw
from gradwire.proto.v1 import link_pb2
from gradwire.transport import GrpcLink, ResponseFuture

SERVED = """
import gradwire_server as gws

@gws.expose
def double(x):
    return 2 * x
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what} never happened"
        time.sleep(0.01)


def results_held(worker: gw.RemoteWorker) -> int:
    return sum(context.results for context in worker.inspect().contexts)


def test_releases_that_could_not_be_told_during_a_cut_are_told_after_it(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = launch(SERVED)
    refused = threading.Event()
    send_request = GrpcLink.send_request

    def watched(link: GrpcLink, method: int, *args: object, **options: object) -> ResponseFuture:
        try:
            return send_request(link, method, *args, **options)  # type: ignore[arg-type]
        except gw.ConnectFailed:
            if method == link_pb2.METHOD_CLEANUP_CONTEXT:
                refused.set()
            raise

    monkeypatch.setattr(GrpcLink, "send_request", watched)
    proxy = FaultyProxy(daemon.address)
    proxy.active = False
    with proxy.running(), gw.connect(daemon.address) as observer:
        with gw.connect(proxy.address, wait_for_ready=False, lost_after=DEADLINE) as worker:
            results = [worker.double(torch.ones(3, requires_grad=True)) for _ in range(5)]
            assert results_held(observer) == 5
            proxy.refuse = True
            proxy.cut_all()
            del results[:]
            # Nothing else is asked that could bring them along: the link tells them by itself.
            assert refused.wait(DEADLINE)
            proxy.refuse = False
            wait_for(lambda: results_held(observer) == 0, "letting go of the results")
