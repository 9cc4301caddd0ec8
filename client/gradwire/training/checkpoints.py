"""Checkpoints: a model and its optimizer, here and on workers, saved as one directory."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradwire.errors import CheckpointMismatch, WrongArguments
from gradwire.torch_internals import set_state_metadata, state_metadata
from gradwire.training.modules import LocalStateDict, RemoteModule
from gradwire.training.optimizers import DistributedOptimizer
from gradwire.training.progress import ByteProgress
from gradwire.training.snapshots import (
    DirectoryLock,
    SnapshotReader,
    SnapshotWriter,
    encoded_dict,
    reading,
)

__all__ = ["LoadedKeys", "load", "save"]

Model = torch.nn.Module | Mapping[str, torch.nn.Module]


class LoadedKeys(NamedTuple):
    """The keys that did not match in a load with ``strict=False``. Both lists are empty otherwise."""

    missing: list[str]
    """Keys of the model that the checkpoint lacks; their values were not changed."""
    unexpected: list[str]
    """Keys of the checkpoint that the model lacks."""


def save(
    path: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    progress: bool | None = None,
) -> None:
    """Saves a model, and its optimizer, as a directory.

    `model` is a module or a dict of modules. They may live here, on workers, or both; the states of remote
    modules are fetched one at a time. The directory holds safetensors files and a manifest with their hashes.
    It is replaced as a whole or not at all: if this process is killed at any time, the checkpoint that was
    there before can still be loaded. `progress` shows a bar; by default if stderr is a terminal.

    Raises `CheckpointError` if the directory cannot be written, or the state has a value that cannot be
    saved.

    >>> import gradwire as gw, tempfile, torch
    >>> layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     gw.save(folder, layer)
    ...     gw.load(folder, other)
    LoadedKeys(missing=[], unexpected=[])
    >>> bool((other.weight == layer.weight).all())
    True
    """
    target = Path(path)
    modules, is_single = _modules(model)
    with (
        DirectoryLock(target),
        ByteProgress(f"saving {target.name}", progress) as bar,
        SnapshotWriter(target, "checkpoint", advance=bar.advance) as writer,
    ):
        state = {
            "single": is_single,
            "model": encoded_dict(
                (name, _write_module(writer, module, name or "model", bar))
                for name, module in modules.items()
            ),
            "optimizer": None if optimizer is None else _write_optimizer(writer, optimizer, bar),
        }
        writer.commit(state)


def load(
    path: str | os.PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    progress: bool | None = None,
) -> LoadedKeys:
    """Loads a checkpoint of `save` into a model and an optimizer of the same structure.

    The modules may live elsewhere than when they were saved. All files are checked against their hashes, and
    all keys and shapes against the model, before anything is changed: `CheckpointError` names a file that is
    missing or damaged, `CheckpointMismatch` the keys and shapes that do not fit. With ``strict=False`` keys
    that only the model or only the checkpoint has are ignored, and returned.
    """
    source = Path(path)
    modules, is_single = _modules(model)
    with ByteProgress(f"loading {source.name}", progress) as bar:

        def begin(size: int) -> Any:
            bar.expect(size)
            return bar.advance

        with SnapshotReader(source, "checkpoint", advance=begin) as snapshot:
            with reading(source):
                saved: dict[str, Any] = _encoded_items(snapshot.state["model"])
                _check_names(source, modules, is_single, saved, snapshot.state["single"])
                keys = LoadedKeys([], [])
                mismatches: list[str] = []
                for name, module in modules.items():
                    _compare_keys_and_shapes(snapshot, name, module, saved[name], keys, mismatches)
                if strict and keys.missing:
                    mismatches.append(f"it lacks {_first_few(keys.missing)}")
                if strict and keys.unexpected:
                    mismatches.append(f"the model lacks {_first_few(keys.unexpected)}")
                _refuse(source, "model", mismatches)
                if optimizer is not None:
                    saved_optimizer = snapshot.state["optimizer"]
                    _refuse(source, "optimizer", _optimizer_mismatches(saved_optimizer, optimizer))
            for name, module in modules.items():
                _load_module(source, snapshot, module, saved[name], strict)
            if optimizer is not None:
                # Copies, because an optimizer keeps the tensors that it is given, and views of the files
                # would end with the snapshot.
                with reading(source):
                    optimizer.load_state_dict(snapshot.get(saved_optimizer["state"], copy=True))
    return keys


def _modules(model: Model) -> tuple[dict[str, torch.nn.Module], bool]:
    if isinstance(model, torch.nn.Module):
        return {"": model}, True
    modules = dict(model)
    for name, module in modules.items():
        if not isinstance(name, str) or not isinstance(module, torch.nn.Module):
            raise WrongArguments(
                f"model is a module or a dict of modules by name; {name!r} is a {type(module).__name__}"
            )
    return modules, False


def _encoded_items(encoded: Any) -> dict[str, Any]:
    """The items of an encoded dict, with the values still encoded."""
    return dict(encoded["$dict"]) if "$dict" in encoded else encoded


# -- modules


def _local_state(module: torch.nn.Module) -> tuple[dict[str, Any], list[tuple[str, RemoteModule]], Any]:
    """The local state, the remote modules with the prefixes of their keys, and torch's version metadata."""
    if any(isinstance(submodule, RemoteModule) for submodule in module.modules()):
        destination = LocalStateDict()
        module.state_dict(destination=destination)
        return destination, destination.remote_modules, state_metadata(destination)
    state = module.state_dict()
    return state, [], state_metadata(state)


def _write_module(writer: SnapshotWriter, module: torch.nn.Module, where: str, bar: ByteProgress) -> Any:
    state, remote_modules, metadata = _local_state(module)
    bar.expect(sum(_nbytes(value) for value in state.values()))
    sizes = [_remote_sizes(part) for _, part in remote_modules]
    bar.expect(sum(entry[1] for size in sizes for entry in size.values() if entry is not None))

    def items() -> Iterator[tuple[str, Any]]:
        for key, value in state.items():
            yield key, writer.put(value, f"{where}.{key}")
        for prefix, part in remote_modules:
            for key, value in part.state_dict().items():
                yield prefix + key, writer.put(value, f"{where}.{prefix}{key}")

    return {"state": encoded_dict(items()), "metadata": writer.put(metadata, f"{where} (versions)")}


def _remote_sizes(module: RemoteModule) -> dict[str, tuple[list[int], int] | None]:
    """The shape and the size in bytes of each tensor of a remote module's state; None for other values."""
    sizes: dict[str, tuple[list[int], int] | None] = module.worker.call(
        "gradwire.module.state_sizes", module.ref
    )
    return sizes


def _nbytes(value: Any) -> int:
    """The size in bytes of all dense tensors in a value."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize if value.layout is torch.strided else 0
    if isinstance(value, Mapping):
        return sum(_nbytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_nbytes(item) for item in value)
    return 0


def _check_names(
    source: Path, modules: Mapping[str, Any], is_single: bool, saved: Mapping[str, Any], saved_single: bool
) -> None:
    if is_single != saved_single or modules.keys() != saved.keys():
        wanted = "one module" if is_single else f"the modules {', '.join(sorted(modules))}"
        there = "one module" if saved_single else f"the modules {', '.join(sorted(saved))}"
        raise CheckpointMismatch(f"{source} is a checkpoint of {there}, not of {wanted}; nothing was loaded")


def _compare_keys_and_shapes(
    snapshot: SnapshotReader,
    name: str,
    module: torch.nn.Module,
    saved: Any,
    keys: LoadedKeys,
    mismatches: list[str],
) -> None:
    """Adds to `keys` and `mismatches` how a module differs from its saved state. Fetches no tensor."""
    state, remote_modules, _ = _local_state(module)
    shapes: dict[str, tuple[int, ...] | None] = {key: _shape(value) for key, value in state.items()}
    for prefix, part in remote_modules:
        for key, entry in _remote_sizes(part).items():
            shapes[prefix + key] = None if entry is None else tuple(entry[0])
    there = _encoded_items(saved["state"])
    prefix = f"{name}." if name else ""
    keys.missing.extend(prefix + key for key in shapes if key not in there)
    keys.unexpected.extend(prefix + key for key in there if key not in shapes)
    wrong: list[str] = []
    for key, shape in shapes.items():
        found = snapshot.shape(there[key]) if key in there else None
        if shape is not None and found is not None and shape != found:
            wrong.append(f"{prefix}{key} has the shape {list(found)} there and {list(shape)} here")
    if wrong:
        mismatches.append(_first_few(wrong))


def _shape(value: Any) -> tuple[int, ...] | None:
    # A lazy module's parameters have no shape until they are loaded.
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)


def _refuse(source: Path, what: str, mismatches: list[str]) -> None:
    if mismatches:
        raise CheckpointMismatch(
            f"{source} does not fit this {what}: {'; '.join(mismatches)}. Nothing was loaded"
        )


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _load_module(
    source: Path, snapshot: SnapshotReader, module: torch.nn.Module, saved: Any, strict: bool
) -> None:
    with reading(source):
        state = OrderedDict(snapshot.get(saved["state"]))
        metadata = snapshot.get(saved["metadata"])
        if metadata is not None:
            set_state_metadata(state, metadata)
        try:
            module.load_state_dict(state, strict=strict)
        except (RuntimeError, WrongArguments) as error:
            raise CheckpointMismatch(f"{source} does not fit this model: {error}") from error


# -- optimizers


def _write_optimizer(writer: SnapshotWriter, optimizer: torch.optim.Optimizer, bar: ByteProgress) -> Any:
    parts = (
        optimizer.state_parts()
        if isinstance(optimizer, DistributedOptimizer)
        else iter(optimizer.state_dict().items())
    )

    def items() -> Iterator[tuple[str, Any]]:
        for key, value in parts:
            if key == "remote":
                yield key, [put(part, f"optimizer.remote.{index}") for index, part in enumerate(value)]
            else:
                yield key, put(value, f"optimizer.{key}")

    def put(value: Any, where: str) -> Any:
        bar.expect(_nbytes(value))
        return writer.put(value, where)

    return {"distributed": isinstance(optimizer, DistributedOptimizer), "state": encoded_dict(items())}


def _optimizer_mismatches(saved: Any, optimizer: torch.optim.Optimizer) -> list[str]:
    """How the groups of an optimizer differ from those that were saved, here and on each worker."""
    if saved is None:
        return ["the checkpoint was saved without an optimizer"]
    is_distributed = isinstance(optimizer, DistributedOptimizer)
    if saved["distributed"] != is_distributed:
        kind = "a DistributedOptimizer" if saved["distributed"] else "a plain torch optimizer"
        return [f"it was saved from {kind}"]
    state = saved["state"]
    if not isinstance(optimizer, DistributedOptimizer):
        return _group_mismatches("", state, [len(group["params"]) for group in optimizer.param_groups])
    here, remote = optimizer.group_sizes()
    if len(state["param_groups"]) != len(optimizer.param_groups):
        return [f"it has {len(state['param_groups'])} groups there and {len(optimizer.param_groups)} here"]
    if len(state["remote"]) != len(remote):
        return [f"it was on {len(state['remote'])} workers, and is on {len(remote)}"]
    if (state["local"] is None) != (here is None):
        return ["it had parameters in the saving process, or has some here, and not both"]
    mismatches = [] if here is None else _group_mismatches("the part here: ", state["local"], here)
    for part, (target, sizes) in zip(state["remote"], remote, strict=True):
        mismatches += _group_mismatches(f"the part on {target}: ", part, sizes)
    return mismatches


def _group_mismatches(where: str, state: Any, sizes: list[int]) -> list[str]:
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved == sizes:
        return []
    return [f"{where}its groups have {saved} parameters there and {sizes} here"]
