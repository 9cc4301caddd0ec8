"""A deadline at the top bounds the whole tree of calls; a cancellation reaches its leaves."""

from __future__ import annotations

import time

import pytest
import torch
from tests.faults.test_deaths import wait_for
from tests.integration.conftest import Launch

import gradwire as gw

SERVED = """
import time
import torch
import gradwire as gw
import gradwire_server as gws

seen = []

@gws.expose
def left():
    return gw.deadline()

@gws.expose
def nested_left(*addresses):
    if not addresses:
        return gw.deadline()
    return gw.connect(addresses[0]).call("nested_left", *addresses[1:])

@gws.expose
def linger(*addresses):
    if addresses:
        return gw.connect(addresses[0]).call("linger", *addresses[1:])
    seen.append("started")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if gw.cancelled():
            seen.append("cancelled")
            return
        time.sleep(0.01)

@gws.expose
def log():
    return seen

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        linger()
        return gradient

@gws.expose
def slow_backward(x):
    return Slow.apply(x)
"""


def test_a_deadline_bounds_nested_calls(launch: Launch) -> None:
    a, b, c = launch(SERVED), launch(SERVED), launch(SERVED)
    with gw.connect(a.address) as worker:
        assert worker.left() is None
        assert 0 < worker.call("nested_left", b.address, c.address, timeout=30.0) < 30
        with gw.timeout(20):
            assert 0 < worker.nested_left(b.address, c.address) < 20
            with gw.timeout(50):
                assert worker.left() < 20


def test_a_deadline_that_runs_out_cancels_the_whole_tree(launch: Launch) -> None:
    a, b, c = launch(SERVED), launch(SERVED), launch(SERVED)
    with gw.connect([a.address, c.address])[0] as worker, gw.connect(c.address) as last:
        with pytest.raises(gw.DeadlineExceeded):
            worker.call("linger", b.address, c.address, timeout=3.0)
        wait_for(lambda: last.log() == ["started", "cancelled"], "the cancellation")


def test_cancelling_reaches_the_leaves(launch: Launch) -> None:
    a, b = launch(SERVED), launch(SERVED)
    with gw.connect(a.address) as worker, gw.connect(b.address) as last:
        future = worker.call_async("linger", b.address)
        wait_for(lambda: last.log() == ["started"], "the call")
        assert future.cancel()
        wait_for(lambda: last.log() == ["started", "cancelled"], "the cancellation")


def test_backward_honours_a_timeout(launch: Launch) -> None:
    daemon = launch(SERVED)
    with gw.connect(daemon.address) as worker:
        x = torch.ones(3, requires_grad=True)
        loss = worker.slow_backward(x).sum()
        started = time.monotonic()
        with pytest.raises(gw.DeadlineExceeded), gw.timeout(1.0):
            loss.backward()
        assert time.monotonic() - started < 30
        wait_for(lambda: worker.log() == ["started", "cancelled"], "the cancellation")


def test_connecting_from_a_served_function_is_bounded_by_its_deadline(launch: Launch) -> None:
    daemon = launch(SERVED)
    with gw.connect(daemon.address) as worker:
        started = time.monotonic()
        with pytest.raises((gw.DeadlineExceeded, gw.ConnectFailed)):
            worker.call("nested_left", "127.0.0.1:1", timeout=1.0)
        assert time.monotonic() - started < 9


def test_nothing_waits_without_wait_for_ready() -> None:
    started = time.monotonic()
    with pytest.raises(gw.ConnectFailed):
        gw.connect("127.0.0.1:1", connect_timeout=60.0, wait_for_ready=False)
    assert time.monotonic() - started < 30
