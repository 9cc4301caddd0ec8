"""Under continual cuts every call runs once, and every gradient counts once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.faults.proxy import FaultyProxy
from tests.integration.conftest import Launch

import gradwire as gw

SERVED = """
import torch
import gradwire_server as gws

calls = []

@gws.expose
def count(token: int) -> int:
    calls.append(token)
    return calls.count(token)

@gws.expose
def seen() -> list:
    return calls

@gws.expose
def echo(x):
    return x

@gws.expose
class Middle(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        linear = torch.nn.Linear
        self.layers = torch.nn.Sequential(linear(6, 6), torch.nn.Tanh(), linear(6, 6)).double()

    def forward(self, x):
        return self.layers(x)
"""


def train(
    address: str, steps: int, on_step: Callable[[gw.RemoteWorker, int], object] = lambda worker, step: None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A split model; its losses, and all parameters at the end."""
    torch.manual_seed(1)
    worker = gw.connect(address, lost_after=30.0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6).double(), worker.create("Middle"))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [model], lr=0.05, momentum=0.9)
    x, y = torch.randn(16, 4).double(), torch.randn(16, 6).double()
    losses = []
    for step in range(steps):
        on_step(worker, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    worker.close()
    return losses, state


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("steps", "faults"), [(150, 60), pytest.param(500, 200, marks=pytest.mark.slow)])
def test_training_under_continual_cuts_ends_with_equal_parameters(
    launch: Launch, steps: int, faults: int
) -> None:
    daemon = launch(SERVED)
    calm_losses, calm_state = train(daemon.address, steps)
    with FaultyProxy(daemon.address, seed=3, bytes_between=(500, 12_000)).running() as proxy:
        losses, state = train(proxy.address, steps)
        fired = sum(proxy.fired.values())
    assert fired >= faults, proxy.fired
    assert losses == calm_losses
    assert all(torch.equal(state[key], calm_state[key]) for key in calm_state)


@pytest.mark.timeout(200)
def test_every_call_runs_once_and_every_reply_arrives(launch: Launch) -> None:
    daemon = launch(SERVED)
    with FaultyProxy(daemon.address, seed=5, bytes_between=(200, 6_000)).running() as proxy:
        with gw.connect(proxy.address, lost_after=30.0) as worker:
            for batch in range(400):
                tokens = range(batch * 25, batch * 25 + 25)
                futures = [worker.call_async("count", token) for token in tokens]
                assert [future.result() for future in futures] == [1] * 25
                if sum(proxy.fired.values()) >= 40:
                    break
    assert sum(proxy.fired.values()) >= 40, proxy.fired
    with gw.connect(daemon.address) as worker:
        assert sorted(worker.seen()) == list(range(25 * (batch + 1)))


@pytest.mark.timeout(200)
def test_a_large_transfer_is_whole_after_cuts_in_the_middle_of_it(launch: Launch) -> None:
    daemon = launch(SERVED)
    x = torch.arange(2_000_000, dtype=torch.float64)
    proxy = FaultyProxy(
        daemon.address, seed=11, kinds=("cut", "reset", "delay"), bytes_between=(1_000_000, 40_000_000)
    )
    with proxy.running(), gw.connect(proxy.address, lost_after=30.0) as worker:
        for _ in range(8):
            assert torch.equal(worker.echo(x), x)
    assert sum(proxy.fired.values()) >= 5, proxy.fired
