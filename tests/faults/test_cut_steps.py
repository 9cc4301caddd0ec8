"""A link that is cut in the middle of an optimizer step, and comes back."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.faults.proxy import FaultyProxy

import gradwire as gw
import gradwire_server as gws
from gradwire.training.distributed_step import DistributedStep
from gradwire.training.optimizers import DistributedOptimizer

SECONDS = 30.0


@pytest.mark.parametrize("waits", [True, False], ids=["waits for ready", "does not wait"])
def test_a_cut_between_prepare_and_commit_tears_no_step(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """One worker is told to commit while the link to the other is cut: the trainer waits for the link."""
    commit = DistributedStep._commit
    with gws.Worker(torch.nn.Linear) as near, gws.Worker(torch.nn.Linear) as far:
        proxy = FaultyProxy(far.address, kinds=())
        proxy.active = False
        with proxy.running():
            to_near = gw.connect(near.address, same_host=False)
            to_far = gw.connect(proxy.address, same_host=False, wait_for_ready=waits, lost_after=SECONDS)
            models = [worker.create("Linear", 2, 2) for worker in (to_near, to_far)]
            before = [model.state_dict()["bias"].clone() for model in models]
            optimizer = DistributedOptimizer(torch.optim.SGD, models, lr=0.5)
            sum(model(torch.ones(1, 2)).sum() for model in models).backward()  # type: ignore[union-attr]

            def cut_then_commit(step: DistributedStep) -> None:
                proxy.refuse = True
                proxy.cut_all()
                give_up_at = time.monotonic() + SECONDS
                while to_far._link.connected:
                    assert time.monotonic() < give_up_at
                    time.sleep(0.001)
                threading.Timer(0.3, setattr, (proxy, "refuse", False)).start()
                commit(step)

            monkeypatch.setattr(DistributedStep, "_commit", cut_then_commit)
            optimizer.step()
            for model, bias in zip(models, before, strict=True):
                assert torch.equal(model.state_dict()["bias"], bias - 0.5)
            to_near.close()
            to_far.close()


@pytest.mark.parametrize("gave_up", [False, True], ids=["still prepared", "given up"])
def test_a_link_that_has_ended_by_the_commit_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch, gave_up: bool
) -> None:
    """The worker makes the step that it has prepared, if it has not given it up meanwhile."""
    commit = DistributedStep._commit
    with gws.Worker(torch.nn.Linear) as near, gws.Worker(torch.nn.Linear) as far:
        handles = [gw.connect(worker.address) for worker in (near, far)]
        models = [handle.create("Linear", 2, 2) for handle in handles]
        before = [model.state_dict()["bias"].clone() for model in models]
        optimizer = DistributedOptimizer(torch.optim.SGD, models, lr=0.5)
        sum(model(torch.ones(1, 2)).sum() for model in models).backward()  # type: ignore[union-attr]

        def end_then_commit(step: DistributedStep) -> None:
            handles[1]._link.abort(gw.WorkerLost("cut"))
            if gave_up:
                for prepared in far._objects.live_optimizers():
                    prepared.abort(step._ticket)
            commit(step)

        monkeypatch.setattr(DistributedStep, "_commit", end_then_commit)
        if gave_up:
            with pytest.raises(gw.StepTorn, match=f"not made on {far.address}"):
                optimizer.step()
        else:
            optimizer.step()
        after = [model.state_dict()["bias"] for model in models]
        assert torch.equal(after[0], before[0] - 0.5)
        assert torch.equal(after[1], before[1] - (0 if gave_up else 0.5))
        for handle in handles:
            handle.close()
