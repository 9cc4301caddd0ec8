"""The state directory: named objects and their optimizers outlive the worker's process.

They are saved regularly and when the worker stops, and restored before a worker serves. Objects that share
parameters or an optimizer are copied together, at a moment when no step is being made; the copies are written
afterwards, while the worker goes on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.errors import CheckpointError
from gradwire.training.snapshots import DirectoryLock, SnapshotReader, SnapshotWriter, reading
from gradwire_server.errors import StateError
from gradwire_server.objects.access import ParameterAccess
from gradwire_server.objects.optimizers import WorkerOptimizer
from gradwire_server.objects.store import ObjectStore
from gradwire_server.objects.stored import Recipe, StoredObject, parameter_sets_of
from gradwire_server.state.saved_objects import (
    Fingerprint,
    IncompatibleState,
    copied_object,
    fingerprint_of,
    restore_object,
)

__all__ = ["StateDirectory"]

log = logging.getLogger("gradwire.server")

_RESERVATION_SECONDS = 5.0
"""How long a save waits for a prepared step to be committed or given up."""
_UNCLAIMED_SECONDS = 24 * 3600.0
"""How long the state of an optimizer is kept for a trainer that has not come back."""


class _UnclaimedOptimizer(NamedTuple):
    """A restored optimizer whose trainer has not come back. `ObjectStore` has its state."""

    modules: list[str]
    """The names of its modules."""
    since: float
    """When its trainer was last there, in time.time's seconds."""


class StateDirectory:
    """The state directory of one worker."""

    def __init__(self, path: Path, objects: ObjectStore, recreate: Callable[[Recipe], object]) -> None:
        self._path = path
        self._objects = objects
        self._recreate = recreate
        self._lock: DirectoryLock | None = None
        self._saving = threading.Lock()
        self._saved_fingerprints: list[Fingerprint] | None = None
        """The fingerprints of all that the last save wrote; None before the first save."""
        self._unclaimed: dict[str, _UnclaimedOptimizer] = {}
        self._warned: set[int] = set()
        """The numbers of the objects that a warning has named as not saved."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        objects.needs_recipes = True

    def open(self) -> None:
        """Locks the directory for this process, and restores what it contains. Raises StateError."""
        try:
            self._lock = DirectoryLock(self._path)
        except CheckpointError as error:
            raise StateError(f"the state directory {error}") from error
        try:
            if (self._path / "manifest.json").exists():
                self._restore()
        except CheckpointError as error:
            self.unlock()
            raise StateError(
                f"the state directory cannot be used: {error}. {self._how_to_start_anew()}"
            ) from error
        except BaseException:
            self.unlock()
            raise

    def save_every(self, seconds: float) -> None:
        """Saves regularly, on a thread of its own, until `close`."""

        def run() -> None:
            while not self._closing.wait(seconds):
                try:
                    self.save()
                except StateError as error:
                    log.error("%s", error, extra={"event": "save-failed"})

        self._thread = threading.Thread(target=run, name="gradwire-state", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Saves a last time and unlocks the directory. Raises StateError if that save failed."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        try:
            # No commit of a prepared step will arrive any more.
            for optimizer in self._objects.live_optimizers():
                optimizer.abort(math.inf)
            self.save()
        finally:
            self.unlock()

    def unlock(self) -> None:
        """Unlocks the directory without saving."""
        self._closing.set()
        if self._lock is not None:
            self._lock.unlock()

    def _how_to_start_anew(self) -> str:
        return f"To start anew, move {self._path} away or give another --state-dir"

    # -- saving

    def save(self) -> bool:
        """Saves, if anything has changed since the last save. Returns whether it had. Raises StateError.

        If a save fails, or the process is killed meanwhile, the save before it stays as it was.
        """
        with self._saving:
            groups = list(self._groups())
            fingerprints = [fingerprint for group in groups for fingerprint in group.fingerprints()]
            if [*fingerprints, self._unclaimed_fingerprint()] == self._saved_fingerprints:
                return False
            try:
                self._saved_fingerprints = self._write(groups)
            except StateError:
                raise
            except CheckpointError as error:
                raise StateError(f"the state was not saved: {error}") from error
            except Exception as error:  # of the user's state_dict()
                raise StateError(f"the state was not saved: {type(error).__name__}: {error}") from error
            return True

    def _write(self, groups: Iterable[_SnapshotGroup]) -> list[Fingerprint]:
        """Copies and writes everything. Returns the fingerprints of what was written."""
        started = time.monotonic()
        objects: dict[str, Any] = {}
        fingerprints: list[Fingerprint] = []
        with SnapshotWriter(self._path, "state") as writer:
            optimizers = {
                uid: writer.put(state, f"optimizers.{uid}") for uid, state in self._unclaimed_states()
            }
            for group in groups:
                copies = group.copy(self._objects.parameters.access)
                fingerprints += copies.fingerprints
                for copy in copies.objects:
                    objects[copy["name"]] = (copy["number"], writer.put(copy, copy["name"]))
                for uid, state in copies.optimizers.items():
                    optimizers[uid] = writer.put(state, f"optimizers.{uid}")
            # In the order of their creation, because an object may be an argument of a later object.
            in_order = [entry for _, entry in sorted(objects.values(), key=lambda numbered: numbered[0])]
            writer.commit({"objects": in_order, "optimizers": list(optimizers.values())})
        log.debug(
            "saved %d objects and %d optimizers in %.3f s",
            len(objects),
            len(optimizers),
            time.monotonic() - started,
            extra={"event": "saved", "objects": sorted(objects), "optimizers": sorted(optimizers)},
        )
        return [*fingerprints, self._unclaimed_fingerprint()]

    def _groups(self) -> Iterator[_SnapshotGroup]:
        """All named objects that can be restored, with their optimizers, in groups to be copied together."""
        named = [stored for stored in self._objects.named() if self._can_be_restored(stored)]
        numbers = {stored.number for stored in named}
        # An optimizer over a module without a name cannot be restored, because the module cannot.
        optimizers = [
            optimizer
            for optimizer in self._objects.live_optimizers()
            if numbers.issuperset(stored.number for stored in optimizer.modules)
        ]
        groups = [_SnapshotGroup([stored], []) for stored in named]
        groups += [_SnapshotGroup(list(optimizer.modules), [optimizer]) for optimizer in optimizers]
        disjoint: list[_SnapshotGroup] = []
        for group in groups:
            overlapping = [other for other in disjoint if other.overlaps(group)]
            disjoint = [other for other in disjoint if other not in overlapping]
            disjoint.append(_SnapshotGroup.joined([*overlapping, group]))
        return iter(disjoint)

    def _can_be_restored(self, stored: StoredObject) -> bool:
        if stored.permanent or stored.recipe is not None:
            return True
        if stored.number not in self._warned:
            self._warned.add(stored.number)
            log.warning(
                "%s is not saved: it was made of objects without a name, which a restart cannot recreate",
                stored.name,
                extra={"event": "not-saved", "object": stored.name},
            )
        return False

    def _unclaimed_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The states to save of optimizers whose trainers have not come back. Forgets those no longer of
        use."""
        names = {stored.name for stored in self._objects.named()}
        for uid, (modules, since) in list(self._unclaimed.items()):
            state = self._objects.restored_optimizer_states.get(uid)
            if state is None or time.time() - since > _UNCLAIMED_SECONDS or not names.issuperset(modules):
                self._objects.restored_optimizer_states.pop(uid, None)
                del self._unclaimed[uid]
            else:
                yield uid, {"uid": uid, "modules": modules, "since": since, "state": state}

    def _unclaimed_fingerprint(self) -> Fingerprint:
        return Fingerprint(sorted(self._unclaimed))

    # -- restoring

    def _restore(self) -> None:
        with SnapshotReader(self._path, "state") as snapshot, reading(self._path):
            incompatible: list[str] = []
            for encoded in snapshot.state["objects"]:
                entry = snapshot.get(encoded)
                _check_text(entry["name"])
                try:
                    restore_object(entry, self._objects, self._recreate)
                except IncompatibleState as error:
                    incompatible.append(f"{entry['name']} ({entry['class_name']}): {error}")
            if incompatible:
                raise StateError(
                    f"the state in {self._path} does not fit what is served. {'; '.join(incompatible)}. "
                    f"Serve what it was saved from. {self._how_to_start_anew()}"
                )
            for encoded in snapshot.state["optimizers"]:
                saved = snapshot.get(encoded, copy=True)
                _check_text(saved["uid"])
                self._objects.restored_optimizer_states[saved["uid"]] = saved["state"]
                self._unclaimed[saved["uid"]] = _UnclaimedOptimizer(saved["modules"], saved["since"])
        names = sorted(stored.name for stored in self._objects.named())
        log.info(
            "restored %s from %s",
            ", ".join(names) or "nothing",
            self._path,
            extra={"event": "restored", "objects": names, "optimizers": sorted(self._unclaimed)},
        )


def _check_text(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{name!r:.80} is no text")


class _Copies(NamedTuple):
    """The copies of a group, all of one moment."""

    fingerprints: list[Fingerprint]
    objects: list[dict[str, Any]]
    optimizers: dict[str, dict[str, Any]]


class _SnapshotGroup:
    """Objects and optimizers that must be copied at one moment, because they share parameters."""

    def __init__(self, objects: list[StoredObject], optimizers: list[WorkerOptimizer]) -> None:
        self.objects = {stored.number: stored for stored in objects}
        self.optimizers = optimizers
        self.parameter_sets = parameter_sets_of(objects)

    @classmethod
    def joined(cls, groups: list[_SnapshotGroup]) -> _SnapshotGroup:
        return cls(
            [stored for group in groups for stored in group.objects.values()],
            [optimizer for group in groups for optimizer in group.optimizers],
        )

    def overlaps(self, other: _SnapshotGroup) -> bool:
        return bool(self.objects.keys() & other.objects.keys() or self.parameter_sets & other.parameter_sets)

    def fingerprints(self) -> list[Fingerprint]:
        of_objects = [fingerprint_of(stored) for stored in self.objects.values()]
        return of_objects + [Fingerprint((optimizer.uid, optimizer.changes)) for optimizer in self.optimizers]

    def copy(self, access: ParameterAccess) -> _Copies:
        reservation = access.reserve(self.parameter_sets, time.monotonic() + _RESERVATION_SECONDS)
        if reservation is None:
            names = ", ".join(stored.name for stored in self.objects.values())
            raise StateError(
                f"the state was not saved: a step of {names} was prepared, and neither made nor given up"
            )
        with reservation:
            return _Copies(
                self.fingerprints(),
                [copied_object(stored) for stored in self.objects.values()],
                {optimizer.uid: _copied_optimizer(optimizer) for optimizer in self.optimizers},
            )


def _copied_optimizer(optimizer: WorkerOptimizer) -> dict[str, Any]:
    return {
        "uid": optimizer.uid,
        "modules": [stored.name for stored in optimizer.modules],
        "since": time.time(),
        "state": optimizer.copied_state(),
    }
