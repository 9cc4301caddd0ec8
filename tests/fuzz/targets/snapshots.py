"""Snapshots: checkpoints of ``gw.save``, and the state directory of a worker.

The first part says whether the hashes are made right again after the changes, as whoever made the snapshot
could; the second is the manifest, the others are the files that it names.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.fuzz.inputs import Input
from tests.fuzz.mutating_bytes import mutate_bytes
from tests.fuzz.mutating_json import mutate_json
from tests.fuzz.target import Target
from tests.fuzz.targets import serving
from tests.fuzz.targets.samples import touch

import gradwire as gw
from gradwire.errors import CheckpointError
from gradwire.training.snapshots import SnapshotReader, directory
from gradwire.wire.dtypes import DTYPES_BY_NAME
from gradwire_server import Worker
from gradwire_server.errors import StateError

__all__ = ["Checkpoints", "State"]

_SIGN = b"sign"


class _Snapshot(Target):
    kinds = (None, "json", None)
    most_parts = 4
    words = (
        *("$tensor", "$tuple", "$dict", "$set", "$size", "$bytes", "$float", "$complex", "$dtype", "$device"),
        *("$sparse", "$sparse_coo", "$frozenset", "00000.safetensors", "../x", ".", "", "\0", "sparse_csr"),
        *(
            "data_offsets",
            "dtype",
            "shape",
            "F32",
            "U8",
            "I64",
            *list(DTYPES_BY_NAME)[:5],
            "objects",
            "optimizers",
        ),
    )

    def mutate(self, random: Random, parts: Input, donor: Input) -> Input:
        changed = list(parts)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            index = min(random.choice((1, 1, 1, 2, 0)), len(changed) - 1)
            changed[index] = self.mutate_part(random, index, changed[index], b"")
        if random.random() < 0.9:
            changed[0] = _SIGN
        return tuple(changed)

    def mutate_part(self, random: Random, index: int, part: bytes, donor: bytes) -> bytes:
        if index == 2 and random.random() < 0.7:  # the header of a file of tensors is JSON
            size = int.from_bytes(part[:8], "little")
            header = mutate_json(random, part[8 : 8 + size], donor, self.words)
            return len(header).to_bytes(8, "little") + header + part[8 + size :]
        if index == 1:
            return mutate_json(random, part, donor, self.words)
        return mutate_bytes(random, part, donor, self.words)


def _written(folder: Path) -> Input:
    manifest = (folder / "manifest.json").read_bytes()
    files = [path.read_bytes() for path in sorted(folder.glob("data-*/*"))]
    return (_SIGN, manifest, *files)


def _write(folder: Path, parts: Input) -> None:
    sign, text, *files = *parts, b"", b""
    data = folder / "data-x"
    data.mkdir()
    for index, content in enumerate(files[: max(len(parts) - 2, 0)]):
        (data / f"{index:05}.safetensors").write_bytes(content)
    (folder / "manifest.json").write_bytes(_signed(text, files) if sign == _SIGN else text)


def _signed(text: bytes, files: list[bytes]) -> bytes:
    """The manifest with the hashes of what it is about."""
    try:
        manifest = json.loads(text)
        if not isinstance(manifest, dict):
            return text
        manifest.pop("sha256", None)
        named = manifest.get("files")
        if isinstance(named, dict):
            for name, content in zip(sorted(named), files, strict=False):
                if isinstance(named[name], dict):
                    digest = hashlib.sha256(content).hexdigest()
                    named[name].update(size=len(content), sha256=digest)
        manifest["sha256"] = directory._hash(manifest)
        return json.dumps(manifest).encode()
    except (ValueError, RecursionError):
        return text


def _fixed(parts: Input) -> Input:
    """With the name of the folder that `_write` makes."""
    manifest = json.loads(parts[1])
    manifest["data"] = "data-x"
    manifest.pop("sha256")
    return (parts[0], json.dumps(manifest).encode(), *parts[2:])


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.extra = torch.nn.BatchNorm1d(2)


def _trained() -> tuple[_Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Model()
    optimizer = torch.optim.Adam(model.parameters())
    model.extra(model.linear(torch.ones(2, 2))).sum().backward()
    optimizer.step()
    return model, optimizer


def _odd() -> dict[str, Any]:
    return {
        "values": [
            1,
            -0.5,
            float("nan"),
            None,
            True,
            (1, 2),
            {1: {2, 3}},
            frozenset({4}),
            torch.Size([1]),
            1j,
        ],
        "bytes": [b"few", bytes(2000), torch.float16, torch.device("cpu")],
        "tensors": [
            torch.ones(2, dtype=torch.bfloat16),
            torch.zeros(0),
            torch.ones(3, dtype=torch.complex128),
        ],
        "sparse": [
            torch.eye(3).to_sparse_coo(),
            torch.eye(3).to_sparse_csr(),
            torch.eye(4).to_sparse_bsr((2, 2)),
        ],
    }


class Checkpoints(_Snapshot):
    name = "checkpoints"
    refuses = (CheckpointError,)

    def corpus(self) -> dict[str, Input]:
        inputs = {}
        with tempfile.TemporaryDirectory() as name:
            model, optimizer = _trained()
            gw.save(name, model, optimizer, progress=False)
            inputs["trained"] = _fixed(_written(Path(name)))
        for kind, values in _odd().items():
            with tempfile.TemporaryDirectory() as name:
                with directory.SnapshotWriter(Path(name), "checkpoint") as writer:
                    writer.commit({"values": writer.put(values, "values")})
                inputs[kind] = _fixed(_written(Path(name)))
        return inputs

    def run(self, parts: Input) -> object:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            _write(Path(name), parts)
            with SnapshotReader(Path(name), "checkpoint") as snapshot:
                for key, encoded in snapshot.state.items():
                    snapshot.shape(encoded)
                    if key == "values":
                        values = snapshot.get(encoded, copy=True)
                        for value in values if isinstance(values, list) else [values]:
                            if isinstance(value, torch.Tensor):
                                touch(value)
            return gw.load(name, *_trained(), progress=False)


class State(_Snapshot):
    name = "state"
    refuses = (StateError,)

    def corpus(self) -> dict[str, Input]:
        inputs = {}
        with tempfile.TemporaryDirectory() as name:
            with Worker(serving, name="state", state_dir=name, threads=1) as worker:
                with gw.connect(worker.address) as handle:
                    layer = handle.create("Layer", 3, name="kept")
                    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [layer])
                    layer(torch.ones(3)).sum().backward()
                    optimizer.step()
                    worker._state.save()  # type: ignore[union-attr]
                    inputs["worker"] = _fixed(_written(Path(name)))
        return inputs

    def run(self, parts: Input) -> object:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            folder = Path(name) / "state"
            folder.mkdir()
            _write(folder, parts)
            worker = Worker(serving.echo, serving.scale, serving.Layer, name="state", state_dir=folder)
            assert worker._state is not None
            try:
                worker._state.open()
            finally:
                worker._state.unlock()
                shutil.rmtree(folder, ignore_errors=True)
        return None
