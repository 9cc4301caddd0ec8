"""The worker's state directory: what has a name outlives the process, however that ends."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.daemons import DEADLINE, Daemon, run
from tests.training import checkpoint_models
from tests.training.test_checkpoints import run_killed, same
from typer.testing import CliRunner

import gradwire as gw
import gradwire_server as gws
from gradwire.training.snapshots import SnapshotReader, directory
from gradwire_server.daemon.cli import app

HERE = Path(__file__).parent
Launch = Callable[..., Daemon]


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def launch(state_dir: Path) -> Iterator[Launch]:
    """Starts a daemon with the state directory; all of them end with the test."""
    started: list[Daemon] = []

    def start(*extra: str, bind: str = "127.0.0.1:0") -> Daemon:
        options = ["--bind", bind, "--state-dir", str(state_dir), "--torch-threads", "1", *extra]
        started.append(Daemon(["checkpoint_models", *options, "--log-level", "debug"], cwd=HERE))
        return started[-1].wait_until_ready()

    yield start
    for daemon in started:
        daemon.stop()


def served(state_dir: Path, *what: object, **settings: Any) -> gws.Worker:
    return gws.Worker(*(what or (checkpoint_models,)), state_dir=state_dir, **settings)


def saved_state(state_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The objects by name, and the optimizers, that a directory holds."""
    with SnapshotReader(state_dir, "state") as snapshot:
        objects = snapshot.get(snapshot.state["objects"], copy=True)
        return {entry["name"]: entry for entry in objects}, snapshot.get(
            snapshot.state["optimizers"], copy=True
        )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for seed in range(steps):
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()


# -- what is restored


def test_named_objects_of_every_kind_are_there_again(state_dir: Path) -> None:
    large = torch.arange(20_000, dtype=torch.float64)
    with served(state_dir) as worker, gw.connect(worker.address) as handle:
        layer = handle.create("Layer", 4, name="layer", stale="allow").eval()
        layer.requires_grad_(False)
        tied = handle.create("Tied", width=3, name="tied").double()
        around = handle.create("Around", layer, large, name="around")
        tally, plain = handle.create("Tally", 1, name="tally"), handle.create("Plain", "word", name="plain")
        handle.create("Layer", 4)  # nobody's business after a restart
        tally.add(41)
        plain.say()
        handle.get("shared").load_state_dict({k: v + 1 for k, v in handle.get("shared").state_dict().items()})
        x = torch.ones(1, 4, dtype=torch.float64)
        before = [dict(m.state_dict()) for m in (layer, tied, handle.get("shared"))], around(x)
    with torch.no_grad():
        for parameter in checkpoint_models.shared.parameters():
            parameter.zero_()  # of this process, so it outlived the worker

    with served(state_dir) as worker, gw.connect(worker.address) as handle:
        again = [dict(handle.get(name).state_dict()) for name in ("layer", "tied", "shared")]
        assert same((again, handle.get("around")(x)), before)
        assert handle.get("tied").is_tied()
        assert handle.get("tally").add(0) == 42
        assert handle.get("plain").say() == "word 1"
        stored = {stored.name: stored for stored in worker._objects.named()}
        assert set(stored) == {"layer", "tied", "around", "tally", "plain", "shared"}
        assert stored["around"].value.inner is stored["layer"].value
        assert stored["layer"].allow_stale
        assert not stored["layer"].value.training
        assert not any(parameter.requires_grad for parameter in stored["layer"].value.parameters())
        assert stored["tied"].value.training


def test_what_was_restored_is_saved_and_restored_again(state_dir: Path) -> None:
    with served(state_dir) as worker, gw.connect(worker.address) as handle:
        state = dict(handle.create("Layer", 4, name="layer").state_dict())
    for _ in range(2):
        with served(state_dir) as worker, gw.connect(worker.address) as handle:
            assert same(dict(handle.get("layer").state_dict()), state)
            assert handle.get("layer").ref.name == "layer"
    with served(state_dir) as worker, gw.connect(worker.address) as handle:
        handle.get("layer").delete()
    with served(state_dir) as worker, gw.connect(worker.address) as handle:
        with pytest.raises(gw.NotFound):
            handle.get("layer")


def test_what_was_made_of_something_without_a_name_is_left_out(
    state_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(state_dir) as worker, gw.connect(worker.address) as handle:
        handle.create("Around", handle.create("Layer", 4), torch.ones(1), name="around")
    assert "around is not saved" in caplog.text
    assert set(saved_state(state_dir)[0]) == {"shared"}


# -- when it is saved


@pytest.mark.parametrize(
    "state",
    [
        [],
        {},
        {"objects": 1, "optimizers": []},
        {"objects": [{}], "optimizers": []},
        {"objects": [], "optimizers": [{"uid": 0.5, "modules": [], "since": 0, "state": {}}]},
    ],
    ids=repr,
)
def test_a_state_of_another_form_is_refused_whatever_its_hash(state_dir: Path, state: object) -> None:
    with served(state_dir):
        pass
    manifest = json.loads((state_dir / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["state"] = state
    manifest["sha256"] = directory._hash(manifest)
    (state_dir / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(gws.StateError, match="To start anew, move"):
        served(state_dir).start()


def test_it_is_saved_now_and_then_if_something_changed(state_dir: Path) -> None:
    with served(state_dir) as worker, gw.connect(worker.address) as handle:
        assert worker._state is not None
        assert worker._state.save()
        assert not worker._state.save()
        for stale in ("error", "allow"):
            layer = handle.create("Layer", 4, name=stale, stale=stale)
            assert worker._state.save()
            optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
            assert worker._state.save()
            train(layer.eval(), optimizer, 1)
            assert worker._state.save()
            assert not worker._state.save()
            layer.load_state_dict(layer.state_dict())
            assert worker._state.save()
            layer.train()
            assert worker._state.save()
            assert not worker._state.save()


def test_a_prepared_step_delays_a_save_but_does_not_block_it(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire_server.state.directory._RESERVATION_SECONDS", 0.2)
    with served(state_dir) as worker, gw.connect(worker.address) as handle:
        assert worker._state is not None
        layer = handle.create("Layer", 4, name="layer")
        optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
        layer(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        (part,) = optimizer._remote
        request = {**optimizer._step_settings(None), "patience": 1.0, "keep_place": False}
        part.start("prepare", 1, request)()
        with pytest.raises(gws.StateError, match="a step of layer was prepared"):
            worker._state.save()
        before = {key: value.clone() for key, value in worker._objects.named()[-1].value.state_dict().items()}
    # Stopped in between: the step is given up, and what is saved is the state before it.
    assert same(saved_state(state_dir)[0]["layer"]["state"], before)


def test_a_last_save_that_fails_is_no_secret(state_dir: Path) -> None:
    worker = served(state_dir).start()
    shutil.rmtree(state_dir)
    with pytest.raises(gws.StateError, match=f"{state_dir} cannot be written"):
        worker.stop()
    assert worker.wait_until_saved(0)


@pytest.mark.timeout(180)
def test_sigterm_saves_and_a_step_that_the_restart_interrupts_is_refused(
    launch: Launch, state_dir: Path
) -> None:
    daemon = launch()
    address = daemon.address
    with gw.connect(address, lost_after=2.0, connect_timeout=DEADLINE) as handle:
        layer = handle.create("Layer", 4, name="layer")
        optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [layer], lr=0.1)
        train(layer, optimizer)
        layer(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        state, optimizer_state = dict(layer.state_dict()), optimizer.state_dict()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        objects, optimizers = saved_state(state_dir)
        assert same(objects["layer"]["state"], state)
        assert same([one["state"] for one in optimizers], optimizer_state["remote"])

        launch(bind=address)
        # The gradients are gone with the process; parameters and optimizer are as they were.
        with pytest.raises(gw.StepRefused) as raised:
            optimizer.step()
        assert raised.value.reason in ("missing", "lost")
        assert same(dict(layer.state_dict()), state)
        assert same(optimizer.state_dict(), optimizer_state)
        train(layer, optimizer, 1)


# -- what cannot be used


def refused(state_dir: Path, *what: object) -> str:
    with pytest.raises(gws.StateError) as raised:
        served(state_dir, *what).start()
    assert raised.value.exit_code == 7
    return str(raised.value)


def test_a_state_of_other_modules_is_refused_by_name(state_dir: Path) -> None:
    with served(state_dir) as worker, gw.connect(worker.address) as handle:
        handle.create("Layer", 4, name="layer")
        handle.create("Tally", 4, name="tally")

    class Layer(torch.nn.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(width, width)

    said = refused(state_dir, Layer)
    assert "layer (Layer): Error(s) in loading state_dict" in said
    assert "shared (Layer): it was an object that the worker's own code exposed, and no longer does" in said
    assert "tally (Tally): it cannot be recreated: UnknownFunction" in said
    assert f"move {state_dir} away" in said
    # Nothing was lost by the attempt.
    with served(state_dir) as worker:
        assert {stored.name for stored in worker._objects.named()} == {"layer", "tally", "shared"}


def test_a_directory_that_is_in_use_damaged_or_none(state_dir: Path) -> None:
    with served(state_dir):
        assert "in use by another process (pid" in refused(state_dir)
    (file,) = state_dir.glob("data-*/*")
    file.write_bytes(file.read_bytes()[:-1])
    assert str(file) in refused(state_dir)
    assert "cannot be written to" in refused(file)
    gw.save(state_dir.parent / "checkpoint", torch.nn.Linear(1, 1))
    assert "a checkpoint written by gw.save" in refused(state_dir.parent / "checkpoint")
    with pytest.raises(ValueError, match="state_dir"):
        gws.Worker(checkpoint_models, save_every=1.0)


def test_the_daemon_exits_with_7(state_dir: Path) -> None:
    state_dir.write_text("")
    arguments = ["serve", "checkpoint_models", "--bind", "127.0.0.1:0", "--state-dir", str(state_dir)]
    result = run("gradwire_server.daemon.cli", *arguments, cwd=HERE)
    assert (result.returncode, "cannot be written to" in result.stderr) == (7, True), result.stderr


def test_save_every_without_a_directory_is_wrong_usage() -> None:
    result = CliRunner().invoke(app, ["serve", "checkpoint_models", "--save-every", "1"])
    assert result.exit_code == 2
    assert "--state-dir" in result.output


# -- kill -9


def wait_until_saved(daemon: Daemon, logged: int) -> None:
    """Until the daemon says that it saved, in a line after the first so many."""
    daemon.wait_for(lambda line: line.get("event") == "saved" and line in daemon.lines[logged:])


@pytest.mark.timeout(180)
def test_training_goes_on_after_kill_9_and_a_restart(launch: Launch, state_dir: Path) -> None:
    daemon = launch("--save-every", "0.05")
    address = daemon.address
    torch.manual_seed(0)
    with gw.connect(address, lost_after=2.0, connect_timeout=2.0) as handle:
        layer = handle.create("Layer", 4, name="layer")
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.float64), layer)
        optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [model], lr=0.05)
        train(model, optimizer, 5)
        for _ in range(2):  # the first may have begun before there was a step
            logged = len(daemon.lines)
            train(model, optimizer, 1)
            wait_until_saved(daemon, logged)

        daemon.signal(signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises((gw.WorkerLost, gw.ConnectFailed, gw.StepRefused, gw.StepTorn)):
            train(model, optimizer, 10_000)
        assert time.monotonic() - started < 20.0
        assert daemon.wait() == -signal.SIGKILL

        objects, (saved_optimizer,) = saved_state(state_dir)
        restarted = launch("--save-every", "0.05", bind=address)
        assert restarted.wait_for("restored")["objects"] == ["layer", "shared"]
        # The same handles: the module is found by its name, the optimizer is made again from what was saved.
        assert same(dict(layer.state_dict()), objects["layer"]["state"])
        assert same(optimizer.state_dict()["remote"], [saved_optimizer["state"]])
        steps = {int(state["step"]) for state in saved_optimizer["state"]["state"].values()}
        train(model, optimizer, 5)
        (remote,) = optimizer.state_dict()["remote"]
        assert {int(state["step"]) for state in remote["state"].values()} == {steps.pop() + 5}
        assert not steps


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_kill_9_while_saving_never_loses_the_state_before(state_dir: Path) -> None:
    found = run_killed("workers", state_dir, seed=21)
    assert found["rounds"] == 30
    assert found["in_the_middle"] >= 5, "hardly any worker was killed in the middle of a save"
    assert found["versions"] > 30
