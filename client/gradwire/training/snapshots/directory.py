"""A directory that holds a complete snapshot at any time, even if its writer is killed.

The files of a new snapshot go into a new sub-directory. When they are on the disk, ``manifest.json`` is
replaced, which the file system does atomically: the new files are the snapshot now. Only then the old files
are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import uuid
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from gradwire._version import __version__
from gradwire.errors import CheckpointError, CheckpointMismatch
from gradwire.training.snapshots import values
from gradwire.training.snapshots.damage import reading
from gradwire.training.snapshots.files import Advance, FileEntry, Shard, TensorFile, write_synced
from gradwire.training.snapshots.values import Json

__all__ = ["DirectoryLock", "SnapshotReader", "SnapshotWriter"]

FORMAT = 1
"""Increased when an older version could not read the snapshots that this version writes."""
MANIFEST = "manifest.json"
_DATA = "data-"
_LOCK = "lock"
SHARD_BYTES = 1 << 30
"""The size at which a file is written and a new one begun; also the memory that a fetched state may take."""
_ATTEMPTS = 20
"""How often to open a snapshot again that another process replaced while it was being opened."""

_KINDS = {
    "checkpoint": "a checkpoint written by gw.save",
    "state": "the state of a worker, written by gradwire-server --state-dir",
}


def _ignore_progress(_: int) -> None:
    pass


class DirectoryLock:
    """A lock of the process that writes to a directory. The system releases it however the process ends."""

    def __init__(self, path: Path) -> None:
        """Creates the directory if need be. Raises CheckpointError if another process holds the lock."""
        try:
            if not path.is_dir():
                path.mkdir(parents=True)
                _sync(path.parent)
            self._descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written to: {error.strerror or error}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            self._descriptor = -1
            raise CheckpointError(
                f"{path} is in use by another process{f' ({holder})' if holder else ''}"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"pid {os.getpid()}\n".encode(), 0)
        _locks.add(self)

    def unlock(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unlock()


_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _after_fork() -> None:
    # A forked process shares the lock with its parent, and would keep it if it lives longer, as a data loader
    # may.
    for lock in list(_locks):
        lock.unlock()


os.register_at_fork(after_in_child=_after_fork)


class SnapshotWriter:
    """Writes one snapshot. Until `commit` the old snapshot stays. Used in a ``with`` block, under the
    lock."""

    def __init__(
        self, path: Path, kind: str, *, advance: Advance = _ignore_progress, shard_bytes: int | None = None
    ) -> None:
        self._path = path
        self._kind = kind
        self._advance = advance
        self._shard_bytes = shard_bytes or SHARD_BYTES
        self._refuse_foreign_manifest()
        self._folder = path / f"{_DATA}{uuid.uuid4().hex}"
        self._files: dict[str, FileEntry] = {}
        self._shard = Shard("00000.safetensors")
        self._folder_exists = False

    def _refuse_foreign_manifest(self) -> None:
        """Raises CheckpointMismatch rather than overwrite a manifest.json of another kind."""
        try:
            manifest = json.loads((self._path / MANIFEST).read_bytes())
        except (OSError, ValueError):
            return  # there is no manifest, or it cannot be read anyway
        kind = manifest.get("kind") if isinstance(manifest, dict) else None
        if kind != self._kind:
            what = _KINDS.get(str(kind), "not gradwire's")
            raise CheckpointMismatch(
                f"{self._path / MANIFEST} is {what}; it is not overwritten. Give another path"
            )

    def put(self, value: object, where: str) -> Json:
        """Encodes a value for the manifest. `where` names it in errors and files.

        Its tensors are read when their file is written: when there are enough for a file, or by `commit`.
        """
        return values.encode(value, where, self._put_tensor)

    def _put_tensor(self, tensor: torch.Tensor, where: str) -> Json:
        size = tensor.numel() * tensor.itemsize
        if self._shard.bytes and self._shard.bytes + size > self._shard_bytes:
            self._flush()
        return self._shard.add(tensor, where)

    def _flush(self) -> None:
        # The writer refers to no tensor afterwards, so the memory of fetched tensors is bounded by one file's
        # size.
        shard = self._shard
        if shard.is_empty:
            return
        self._shard = Shard(f"{len(self._files) + 1:05}.safetensors")
        try:
            if not self._folder_exists:
                self._folder_exists = True
                self._folder.mkdir()
            self._files[shard.name] = shard.write(self._folder, self._advance)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise self._unwritable(error) from error

    def commit(self, state: Mapping[str, Json]) -> None:
        """Makes this the snapshot of the directory, and removes the old one."""
        self._flush()
        content = {
            "format": FORMAT,
            "kind": self._kind,
            "gradwire": __version__,
            "torch": str(torch.__version__),
            "data": self._folder.name,
            "files": {name: entry._asdict() for name, entry in self._files.items()},
            "state": dict(state),
        }
        content["sha256"] = _hash(content)
        temporary = self._path / f"{MANIFEST}.new"
        try:
            _sync(self._folder)
            # The files that the manifest names must be on the disk before the manifest is.
            _sync(self._path)
            write_synced(temporary, json.dumps(content, indent=1, allow_nan=False).encode())
            os.replace(temporary, self._path / MANIFEST)
            self._folder_exists = False  # it belongs to the snapshot now, so __exit__ must not remove it
            _sync(self._path)
        except OSError as error:
            raise self._unwritable(error) from error
        for other in self._path.glob(f"{_DATA}*"):
            if other.name != self._folder.name:
                shutil.rmtree(other, ignore_errors=True)

    def _unwritable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._path} cannot be written: {error.strerror or error}. What was there before is unharmed"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder_exists:
            shutil.rmtree(self._folder, ignore_errors=True)


class SnapshotReader:
    """Reads a snapshot whose files were all checked. Used in a ``with`` block."""

    def __init__(self, path: Path, kind: str, *, advance: Callable[[int], Advance] | None = None) -> None:
        """Checks all files. `advance` is called with their total size, and returns a callable for the
        progress."""
        self._path = path
        with reading(path):
            manifest, self._files = _open(path, kind)
        try:
            with reading(path):
                self.state: Mapping[str, Json] = dict(manifest["state"])
                entries = {name: FileEntry(**entry) for name, entry in manifest["files"].items()}
            report = (
                _ignore_progress
                if advance is None
                else advance(sum(entry.size for entry in entries.values()))
            )
            for name, file in self._files.items():
                try:
                    with reading(file.path):
                        file.check(entries[name], report)
                except OSError as error:
                    if isinstance(error, CheckpointError):
                        raise
                    raise CheckpointError(f"{file.path} cannot be read: {error}") from error
        except BaseException:
            self.close()
            raise

    def get(self, encoded: Json, *, copy: bool = False) -> Any:
        """Decodes a value of the manifest. Without `copy` its tensors are views of the files."""
        with reading(self._path):
            return values.decode(
                encoded, lambda reference: self._file(reference).tensor(reference, copy=copy)
            )

    def shape(self, encoded: Json) -> tuple[int, ...] | None:
        """The shape of a tensor in the manifest; None for anything else."""
        if not isinstance(encoded, dict):
            return None
        with reading(self._path):
            if "$tensor" in encoded:
                return self._file(encoded).shape(encoded)
            sparse = encoded.get("$sparse_coo") or encoded.get("$sparse")
            return tuple(sparse["shape"]) if isinstance(sparse, dict) else None

    def _file(self, reference: Mapping[str, Json]) -> TensorFile:
        name = reference["$tensor"][0]
        if name not in self._files:
            raise CheckpointError(f"the manifest refers to a file {name!r} that it does not list")
        return self._files[name]

    def close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, TensorFile]]:
    """Opens all files of a snapshot. Starts again if another process replaces the snapshot meanwhile."""
    for attempt in range(_ATTEMPTS):
        manifest = _read_manifest(path, kind)
        files: dict[str, TensorFile] = {}
        try:
            for name in manifest["files"]:
                files[name] = TensorFile(path / manifest["data"] / name)
            return manifest, files
        except OSError as error:
            for file in files.values():
                file.close()
            replaced = attempt + 1 < _ATTEMPTS and manifest["data"] != _read_manifest(path, kind)["data"]
            if not replaced:
                raise CheckpointError(
                    f"{error.filename} cannot be read: {error.strerror or error}; {path} is incomplete"
                ) from error
    raise AssertionError("unreachable")


def _read_manifest(path: Path, kind: str) -> dict[str, Any]:
    manifest_path = path / MANIFEST
    try:
        manifest = json.loads(manifest_path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} holds no checkpoint: there is no {MANIFEST}") from error
    except OSError as error:
        raise CheckpointError(f"{manifest_path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{manifest_path} is damaged: it is no JSON ({error})") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise CheckpointError(f"{manifest_path} is no manifest of a checkpoint")
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{manifest_path} has format {manifest['format']}, written by gradwire "
            f"{manifest.get('gradwire')}; this version reads up to {FORMAT}"
        )
    if manifest.pop("sha256", None) != _hash(manifest):
        raise CheckpointError(f"{manifest_path} is damaged: its sha256 is not that of its content")
    if manifest["kind"] != kind:
        what = _KINDS.get(manifest["kind"], f"a {manifest['kind']}")
        raise CheckpointMismatch(f"{path} is {what}, and not {_KINDS[kind]}")
    for name in (manifest["data"], *manifest["files"]):
        if Path(name).name != name or name == "..":
            raise CheckpointError(f"{manifest_path} names a file outside of its directory: {name!r}")
    return manifest


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Waits until the entries of a directory are on the disk."""
    if not folder.exists():
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems cannot, and need not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
