"""Training goes on, bit for bit, whatever carries it, and while that dies: sockets of each kind, and gRPC."""

from __future__ import annotations

import pytest
import torch
from tests.faults.carriers import CARRIERS, FLAGS, SETTINGS, carrier_of, cut, cut_now_and_then
from tests.faults.test_exactly_once import SERVED, train
from tests.integration.conftest import Launch

import gradwire as gw
from gradwire.transport import grpc_link

STEPS = 60

CUT_HERE = (
    SERVED
    + """
from tests.faults.carriers import block, cut
gws.expose(block)
gws.expose(cut)
"""
)


def same(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_training_while_its_carrier_is_cut_again_and_again(
    launch: Launch, carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_link, "_AVOID_DIRECT_SECONDS", 0.0)  # it goes back to the direct socket
    daemon = launch(CUT_HERE, *FLAGS[carrier])
    carried = set()
    control = gw.connect(daemon.address, lost_after=60.0, **SETTINGS["grpc"])
    with cut_now_and_then(5, (0.0, 0.02), [cut, control.cut]) as count:

        def wait_for_cuts(worker: gw.RemoteWorker, step: int) -> None:
            carried.add(carrier_of(worker._link))
            while count[carrier] < step // 3:
                worker.echo(step)

        losses, state = train(daemon.address, STEPS, wait_for_cuts)
    control.close()
    assert count[carrier] >= STEPS // 3 - 1, count
    assert carrier in carried
    calm_losses, calm_state = train(daemon.address, STEPS)
    assert losses == calm_losses
    assert same(state, calm_state)


def test_training_goes_on_over_the_carrier_that_is_left(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unix socket dies, later the direct port is blocked; in the end only gRPC is left."""
    monkeypatch.setattr(grpc_link, "_AVOID_DIRECT_SECONDS", 0.0)
    daemon = launch(CUT_HERE)
    control = gw.connect(daemon.address, lost_after=60.0, **SETTINGS["grpc"])
    carried = []

    def lose_one(worker: gw.RemoteWorker, step: int) -> None:
        carried.append(carrier_of(worker._link))
        lost = {20: "unix", 40: "tcp"}.get(step)
        if lost is not None:
            assert control.block([lost]) == {lost: 1}
            cut_there = cut if step == 20 else control.cut
            assert cut_there([lost])[lost] >= 1
            worker.echo(step)  # over whatever is left

    losses, state = train(daemon.address, STEPS, lose_one)
    control.close()
    assert carried[0] == "unix"
    assert carried[30] == "tcp"
    assert carried[-1] == "grpc"
    calm_losses, calm_state = train(daemon.address, STEPS)
    assert losses == calm_losses
    assert same(state, calm_state)
