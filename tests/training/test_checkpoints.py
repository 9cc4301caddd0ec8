"""`gw.save` and `gw.load`: the same numbers come back, or nothing does."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.integration.daemons import DEADLINE, Daemon
from tests.training.checkpoint_models import Tied

import gradwire as gw
from gradwire.training.snapshots import DirectoryLock, SnapshotReader, SnapshotWriter, directory

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[Daemon]]:
    started = [
        Daemon(["checkpoint_models", "--bind", "127.0.0.1:0", "--name", name, "--torch-threads", "1"], HERE)
        for name in "ab"
    ]
    try:
        yield [daemon.wait_until_ready() for daemon in started]
    finally:
        for daemon in started:
            daemon.stop()


@pytest.fixture
def workers(daemons: list[Daemon]) -> Iterator[list[gw.RemoteWorker]]:
    handles = gw.connect([daemon.address for daemon in daemons])
    yield handles
    for handle in handles:
        handle.close()


def same(first: Any, second: Any) -> bool:
    """Equal to the last bit, in the same types."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype == second.dtype
            and first.shape == second.shape
            and first.numpy().tobytes() == second.numpy().tobytes()
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and all(map(same, first, second)) and len(first) == len(second)
    return type(first) is type(second) and (first == second or (first != first and second != second))


# -- models and optimizers


class Trainer:
    """A model of one local and two remote layers, one of which has a name."""

    def __init__(self, workers: list[gw.RemoteWorker], name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.named = workers[1].create("Layer", 4, name=name)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 4, dtype=torch.float64), workers[0].create("Layer", width=4), self.named
        )
        self.optimizer = gw.optim.DistributedOptimizer(
            torch.optim.AdamW, [{"params": [self.model[0]], "lr": 0.1}, *self.model[1:]], lr=0.05
        )

    def train(self, steps: int) -> list[float]:
        losses = []
        data = torch.Generator().manual_seed(7)
        for _ in range(steps):
            x = torch.randn(8, 4, dtype=torch.float64, generator=data)
            self.optimizer.zero_grad()
            loss = (self.model(x) - x.flip(1)).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy((dict(self.model.state_dict()), self.optimizer.state_dict()))


def test_training_goes_on_as_if_it_had_not_been_interrupted(
    workers: list[gw.RemoteWorker], tmp_path: Path
) -> None:
    first = Trainer(workers, "whole", seed=1)
    first.train(5)
    gw.save(tmp_path / "checkpoint", first.model, first.optimizer)
    saved = first.state()
    losses = first.train(5)

    second = Trainer(workers, "resumed", seed=2)
    assert not same(second.state()[0], saved[0])
    assert gw.load(tmp_path / "checkpoint", second.model, second.optimizer) == ([], [])
    assert same(second.state(), saved)
    assert second.train(5) == losses
    assert same(second.state(), first.state())
    for trainer in (first, second):
        trainer.named.delete()


def test_a_dict_of_modules_and_a_plain_optimizer(workers: list[gw.RemoteWorker], tmp_path: Path) -> None:
    def make(seed: int) -> tuple[dict[str, torch.nn.Module], torch.optim.Optimizer]:
        torch.manual_seed(seed)
        local = torch.nn.Linear(4, 4)
        return {"here": local, "there": workers[0].create("Layer", 4)}, torch.optim.Adam(local.parameters())

    modules, optimizer = make(1)
    modules["here"](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    gw.save(tmp_path, modules, optimizer)
    others, other_optimizer = make(2)
    gw.load(tmp_path, others, other_optimizer)
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert all(same(dict(others[key].state_dict()), dict(modules[key].state_dict())) for key in modules)
    # The optimizer's state is its own memory, not the file's.
    others["here"](torch.ones(1, 4)).sum().backward()
    other_optimizer.step()
    gw.load(tmp_path, make(3)[0])


def test_a_remote_module_alone_and_tied_parameters(workers: list[gw.RemoteWorker], tmp_path: Path) -> None:
    tied, local = workers[0].create("Tied", 3), Tied(3)
    gw.save(tmp_path, local)
    gw.load(tmp_path, tied)
    assert tied.is_tied()
    assert same(dict(tied.state_dict()), dict(local.state_dict()))
    # Stored once: it is one tensor.
    assert sum(file.stat().st_size for file in tmp_path.glob("data-*/*")) < 400


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    for value in range(3):
        layer.weight.detach().fill_(value)
        gw.save(tmp_path, layer)
        gw.load(tmp_path, other := torch.nn.Linear(2, 2))
        assert same(other.weight.detach(), layer.weight.detach())
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["data", "lock", "manifest.json"]


def test_other_tools_can_read_the_files(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 3)
    gw.save(tmp_path, layer)
    (file,) = tmp_path.glob("data-*/*.safetensors")
    with safe_open(file, "pt") as tensors:
        assert same(tensors.get_tensor("model.weight"), layer.weight.detach())


# -- what does not fit


def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    workers: list[gw.RemoteWorker], tmp_path: Path
) -> None:
    def make(width: int, depth: int = 1) -> torch.nn.Module:
        layers = [torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(depth)]
        return torch.nn.Sequential(*layers, workers[0].create("Layer", width))

    gw.save(tmp_path, make(4))
    for model, said in [
        (make(5), r"1\.linear\.weight has the shape \[4, 4\] there and \[5, 5\] here"),
        (make(4, depth=2), r"it lacks 1\.weight, 1.*the model lacks 1\.linear\.weight, 1"),
        ({"a": make(4)}, "a checkpoint of one module, not of the modules a"),
    ]:
        before = {k: v.clone() for k, v in model.state_dict().items()} if not isinstance(model, dict) else {}
        with pytest.raises(gw.CheckpointMismatch, match=said):
            gw.load(tmp_path, model)
        assert isinstance(model, dict) or same(before, dict(model.state_dict()))
    lenient = make(4, depth=2)
    keys = gw.load(tmp_path, lenient, strict=False)
    assert "1.weight" in keys.missing
    assert "1.linear.weight" in keys.unexpected


def test_an_optimizer_that_does_not_fit(workers: list[gw.RemoteWorker], tmp_path: Path) -> None:
    local, remote = torch.nn.Linear(4, 4), workers[0].create("Layer", 4)
    gw.save(tmp_path / "without", local)
    gw.save(tmp_path / "plain", local, torch.optim.SGD(local.parameters()))
    gw.save(tmp_path / "both", local, gw.optim.DistributedOptimizer(torch.optim.SGD, [local, remote]))
    more = torch.optim.SGD([*local.parameters(), torch.zeros(1, requires_grad=True)])
    here = gw.optim.DistributedOptimizer(torch.optim.SGD, [local])
    tied = gw.optim.DistributedOptimizer(torch.optim.SGD, [local, workers[0].create("Tied", 4)])
    before = local.weight.detach().clone()
    local.weight.detach().add_(1)
    for name, optimizer, said in [
        ("without", more, "saved without an optimizer"),
        ("plain", here, "saved from a plain torch optimizer"),
        ("both", more, "saved from a DistributedOptimizer"),
        ("plain", more, r"its groups have \[2\] parameters there and \[3\] here"),
        ("both", here, "it was on 1 workers, and is on 0"),
        ("both", tied, r"the part on 127.*\[4\] parameters there and \[1\] here"),
    ]:
        with pytest.raises(gw.CheckpointMismatch, match=said):
            gw.load(tmp_path / name, local, optimizer)
        assert same(local.weight.detach(), before + 1)


# -- what is damaged


def _damage(path: Path, how: str) -> Path:
    (file,) = path.glob("data-*/*")
    manifest = path / "manifest.json"
    match how:
        case "bit":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        case "missing":
            file.unlink()
        case "no manifest":
            manifest.unlink()
            return path
        case "half a manifest":
            manifest.write_text(manifest.read_text()[:-9])
            return manifest
        case "changed manifest":
            manifest.write_text(manifest.read_text().replace('"single": true', '"single": false'))
            return manifest
        case "future":
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
            return manifest
    return file


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("bit", "sha256"),
        ("truncated", "bytes, and was written with"),
        ("missing", "No such file"),
        ("no manifest", "no manifest.json"),
        ("half a manifest", "no JSON"),
        ("changed manifest", "sha256"),
        ("future", "format 99"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path: Path, how: str, said: str) -> None:
    layer = torch.nn.Linear(2, 2)
    gw.save(tmp_path, layer)
    name = _damage(tmp_path, how)
    before = layer.weight.detach().add_(1).clone()
    with pytest.raises(gw.CheckpointError, match=said) as raised:
        gw.load(tmp_path, layer)
    assert str(name) in str(raised.value)
    assert isinstance(raised.value, OSError)
    assert same(layer.weight.detach(), before)


def _forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and makes its hash right again, as anybody can who passes on a checkpoint."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    change(manifest)
    manifest["sha256"] = directory._hash(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def _weight(manifest: dict[str, Any]) -> dict[str, Any]:
    weight: dict[str, Any] = _module(manifest)["state"]["weight"]
    return weight


def _module(manifest: dict[str, Any]) -> dict[str, Any]:
    module: dict[str, Any] = manifest["state"]["model"][""]
    return module


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no kind": lambda manifest: manifest.pop("kind"),
    "a kind that is a list": lambda manifest: manifest.update(kind=[]),
    "no folder": lambda manifest: manifest.pop("data"),
    "the folder above": lambda manifest: manifest.update(data=".."),
    "a folder that is no text": lambda manifest: manifest.update(data=[]),
    "a folder with a zero byte": lambda manifest: manifest.update(data="\0"),
    "a list of files": lambda manifest: manifest.update(files=["00000.safetensors"]),
    "a file that is described by a text": lambda manifest: manifest["files"].update(x="y"),
    "no state": lambda manifest: manifest.pop("state"),
    "a state that is a list": lambda manifest: manifest.update(state=[]),
    "no model": lambda manifest: manifest["state"].pop("model"),
    "a model that is a number": lambda manifest: manifest["state"].update(model=1),
    "no optimizer": lambda manifest: manifest["state"].pop("optimizer"),
    "an optimizer that is a list": lambda manifest: manifest["state"].update(optimizer=[]),
    "an optimizer without groups": lambda manifest: manifest["state"]["optimizer"].update(state={}),
    "a tensor without a name": lambda manifest: _weight(manifest).update({"$tensor": []}),
    "a tensor that is a number": lambda manifest: _weight(manifest).update({"$tensor": 1}),
    "a tensor of an unknown dtype": lambda manifest: _weight(manifest).update(dtype="no"),
    "a tensor in another form": lambda manifest: _weight(manifest).update(shape="no"),
    "a set of lists": lambda manifest: _module(manifest).update(metadata={"$set": [[]]}),
    "a sparse tensor that is none": lambda manifest: _module(manifest).update(
        metadata={"$sparse_coo": {"indices": [], "values": [], "shape": [], "coalesced": True}}
    ),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_manifest_of_another_form_is_refused_whatever_its_hash(tmp_path: Path, how: str) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    gw.save(tmp_path, layer, optimizer)
    _forge(tmp_path, FORGED[how])
    before = layer.weight.detach().add_(1).clone()
    with pytest.raises(gw.CheckpointError, match=str(tmp_path)):
        gw.load(tmp_path, layer, optimizer)
    assert same(layer.weight.detach(), before)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr])
def test_sparse_tensors_with_indices_beyond_their_shape_are_refused(
    tmp_path: Path, layout: torch.layout
) -> None:
    """They would lead to any memory."""
    blocks = (2, 2) if layout is torch.sparse_bsr else None
    with SnapshotWriter(tmp_path, "checkpoint") as writer:
        sparse = torch.eye(4).to_sparse(layout=layout, blocksize=blocks)
        writer.commit({"value": writer.put(sparse, "value")})

    def shrink(manifest: dict[str, Any]) -> None:
        (described,) = manifest["state"]["value"].values()
        described["shape"] = [2, 2]

    _forge(tmp_path, shrink)
    with SnapshotReader(tmp_path, "checkpoint") as snapshot:
        with pytest.raises(gw.CheckpointError, match="is damaged, or was not written by gradwire"):
            snapshot.get(snapshot.state["value"])


def test_what_is_not_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(gw.CheckpointMismatch, match="not gradwire's"):
        gw.save(tmp_path, layer)
    (tmp_path / "file").write_text("")
    with pytest.raises(gw.CheckpointError, match="cannot be written to"):
        gw.save(tmp_path / "file", layer)


def test_two_cannot_save_to_one_directory_at_once(tmp_path: Path) -> None:
    with DirectoryLock(tmp_path), pytest.raises(gw.CheckpointError, match=rf"in use.*pid {os.getpid()}"):
        gw.save(tmp_path, torch.nn.Linear(2, 2))
    gw.save(tmp_path, torch.nn.Linear(2, 2))


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    class Odd(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return {"handle": object()}

    gw.save(tmp_path, torch.nn.Linear(2, 2))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(gw.CheckpointError, match=r"model\._extra_state\.handle is a object"):
        gw.save(tmp_path, Odd(2, 2))
    assert sorted(tmp_path.iterdir()) == before


# -- values


def _round_trip(path: Path, value: Any, shard_bytes: int | None = None) -> Any:
    with DirectoryLock(path), SnapshotWriter(path, "checkpoint", shard_bytes=shard_bytes) as writer:
        writer.commit({"value": writer.put(value, "value")})
    with SnapshotReader(path, "checkpoint") as snapshot:
        return snapshot.get(snapshot.state["value"])


def test_values_come_back_in_their_exact_types(tmp_path: Path) -> None:
    value = {
        "numbers": [1, 1.0, True, -0.0, math.inf, -math.inf, math.nan, 2**70, 1e-320, 1 + 2j],
        "others": [None, "ü", b"", b"x" * 5000, (1, [2, (3,)]), {1, 2}, torch.Size([1, 2]), torch.bfloat16],
        "keys": {0: "int", "0": "text", (1, "a"): "tuple", "$tensor": "dollar", None: "none"},
        "empty": [{}, [], ()],
        "device": torch.device("cpu"),
    }
    back = _round_trip(tmp_path, value)
    assert same(back, value)
    assert math.copysign(1, back["numbers"][3]) == -1
    assert same(_round_trip(tmp_path, OrderedDict(a=1)), {"a": 1})


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_tensors_of_every_kind(tmp_path: Path, shard_bytes: int) -> None:
    bits = torch.arange(96, dtype=torch.uint8)
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 complex64 "
    names += "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    dense = {name: bits.clone().view(getattr(torch, name)) for name in names.split()}
    dense["bool"] = torch.tensor([True, False])
    odd = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "expanded": torch.ones(1).expand(4),
        "conjugate": torch.tensor([1 + 1j]).conj(),
        "nan": torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32),
    }
    back = _round_trip(
        tmp_path, {"dense": dense, "odd": odd, "sparse": torch.eye(3).to_sparse()}, shard_bytes
    )
    for name, tensor in dense.items():
        found = back["dense"][name]
        assert found.dtype == tensor.dtype
        assert found.untyped_storage().nbytes() >= tensor.nbytes
        assert torch.equal(found.contiguous().view(torch.uint8), tensor.view(torch.uint8)), name
    assert same(list(back["odd"].values()), [t.resolve_conj().contiguous() for t in odd.values()])
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    assert len(list(tmp_path.glob("data-*/*"))) == (1 if shard_bytes > 1 else len(dense) + len(odd) + 1)


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    for value, said in [
        ([torch.empty(2, device="meta")], r"value\.0 is a meta tensor"),
        ({"a": object()}, r"value\.a is a object"),
    ]:
        with pytest.raises(gw.CheckpointError, match=said):
            _round_trip(tmp_path, value)


def test_files_are_split_and_memory_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "SHARD_BYTES", 4096)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(10)))
    gw.save(tmp_path, model)
    sizes = [file.stat().st_size for file in tmp_path.glob("data-*/*")]
    assert len(sizes) >= 3
    assert max(sizes) < 4096 + 1024  # with the header
    gw.load(tmp_path, other := torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(10))))
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_a_progress_bar_is_shown_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gw.save(tmp_path, torch.nn.Linear(2, 2))
    assert capsys.readouterr().err == ""
    gw.save(tmp_path, torch.nn.Linear(2, 2), progress=True)
    gw.load(tmp_path, torch.nn.Linear(2, 2), progress=True)
    shown = capsys.readouterr().err
    assert "saving" in shown
    assert "loading" in shown


# -- killed


def run_killed(scenario: str, path: Path, seed: int) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, str(HERE / "killed.py"), scenario, str(path), str(seed)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, int] = json.loads(result.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_kill_9_while_saving_never_loses_the_checkpoint_before(tmp_path: Path) -> None:
    found = run_killed("checkpoints", tmp_path / "checkpoint", seed=20)
    assert found["rounds"] == 30
    assert found["in_the_middle"] >= 5, "hardly any process was killed in the middle of a save"
