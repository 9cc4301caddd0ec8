"""The state directory: named objects, with the optimizers over them, outlive the worker's process.

They are saved now and then and when the worker stops, and made again before it serves. Objects that share
parameters or an optimizer are copied together, while no step can be made; they are written afterwards.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gradwire.errors import CheckpointError
from gradwire.training.snapshots import DirectoryLock, SnapshotReader, SnapshotWriter
from gradwire_server.errors import StateError
from gradwire_server.objects.access import Access
from gradwire_server.objects.optimizers import WorkerOptimizer
from gradwire_server.objects.store import HeldObject, ObjectStore, Recipe
from gradwire_server.state.restoring import Mark, Misfit, copied_object, mark_of, restore_object

__all__ = ["StateDir"]

log = logging.getLogger("gradwire.server")

_PATIENCE_SECONDS = 5.0
"""How long a save waits for a step that was prepared to be made or given up."""
_UNCLAIMED_SECONDS = 24 * 3600.0
"""How long the state of an optimizer is kept for a trainer that has not come back."""


class StateDir:
    """The directory of one worker."""

    def __init__(self, path: Path, objects: ObjectStore, make_again: Callable[[Recipe], object]) -> None:
        self._path = path
        self._objects = objects
        self._make_again = make_again
        self._lock: DirectoryLock | None = None
        self._saving = threading.Lock()
        self._saved_marks: list[Mark] | None = None
        self._unclaimed: dict[str, tuple[list[str], float]] = {}
        """Of optimizers whose trainers have not come back: their modules, and when they were last seen."""
        self._warned: set[int] = set()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        # From now on it is kept how objects are made.
        objects.are_saved = True

    def open(self) -> None:
        """Takes the directory for this process, and makes what it holds again. Raises StateError."""
        try:
            self._lock = DirectoryLock(self._path)
        except CheckpointError as error:
            raise StateError(f"the state directory {error}") from error
        try:
            if (self._path / "manifest.json").exists():
                self._restore()
        except CheckpointError as error:
            self.release()
            raise StateError(
                f"the state directory cannot be used: {error}. {self._how_to_go_on()}"
            ) from error
        except BaseException:
            self.release()
            raise

    def save_every(self, seconds: float) -> None:
        """Saves what has changed again and again, until `close`."""

        def run() -> None:
            while not self._closing.wait(seconds):
                try:
                    self.save()
                except StateError as error:
                    log.error("%s", error, extra={"event": "save-failed"})

        self._thread = threading.Thread(target=run, name="gradwire-state", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Saves a last time and lets go of the directory. Raises StateError if that save failed."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        try:
            # No commit will come any more for what was prepared.
            for optimizer in self._objects.live_optimizers():
                optimizer.abort(math.inf)
            self.save()
        finally:
            self.release()

    def release(self) -> None:
        """Lets go of the directory without saving."""
        self._closing.set()
        if self._lock is not None:
            self._lock.release()

    def _how_to_go_on(self) -> str:
        return f"To start anew, move {self._path} away or give another --state-dir"

    # -- saving

    def save(self) -> bool:
        """Saves, if anything has changed since the last time; whether it had. Raises StateError.

        What was saved before stays whenever this fails, or the process is killed.
        """
        with self._saving:
            groups = list(self._groups())
            marks = [mark for group in groups for mark in group.marks()] + [Mark(sorted(self._unclaimed))]
            if marks == self._saved_marks:
                return False
            try:
                self._saved_marks = self._write(groups)
            except StateError:
                raise
            except CheckpointError as error:
                raise StateError(f"the state was not saved: {error}") from error
            except Exception as error:  # of a state_dict() of the user's
                raise StateError(f"the state was not saved: {type(error).__name__}: {error}") from error
            return True

    def _write(self, groups: Iterable[_Group]) -> list[Mark]:
        started = time.monotonic()
        objects: dict[str, Any] = {}
        marks: list[Mark] = []
        with SnapshotWriter(self._path, "state") as writer:
            optimizers = {
                uid: writer.put(state, f"optimizers.{uid}") for uid, state in self._unclaimed_states()
            }
            for group in groups:
                group_marks, copies, states = group.copy(self._objects.access)
                marks += group_marks
                for copy in copies:
                    objects[copy["name"]] = (copy["number"], writer.put(copy, copy["name"]))
                for uid, state in states.items():
                    optimizers[uid] = writer.put(state, f"optimizers.{uid}")
            # In the order in which they were made: one may be made of another.
            in_order = [entry for _, entry in sorted(objects.values(), key=lambda numbered: numbered[0])]
            writer.commit({"objects": in_order, "optimizers": list(optimizers.values())})
        log.debug(
            "saved %d objects and %d optimizers in %.3f s",
            len(objects),
            len(optimizers),
            time.monotonic() - started,
            extra={"event": "saved", "objects": sorted(objects), "optimizers": sorted(optimizers)},
        )
        return [*marks, Mark(sorted(self._unclaimed))]

    def _groups(self) -> Iterator[_Group]:
        """Named objects that must be copied together, with the optimizers over them."""
        named = [held for held in self._objects.named() if self._can_be_made_again(held)]
        numbers = {held.number for held in named}
        # An optimizer over a module without a name cannot be made again as it was.
        optimizers = [
            optimizer
            for optimizer in self._objects.live_optimizers()
            if numbers.issuperset(held.number for held in optimizer.modules)
        ]
        groups = [_Group([held], []) for held in named]
        groups += [_Group(list(optimizer.modules), [optimizer]) for optimizer in optimizers]
        apart: list[_Group] = []
        for group in groups:
            touching = [other for other in apart if other.touches(group)]
            apart = [other for other in apart if other not in touching]
            apart.append(_Group.joined([*touching, group]))
        return iter(apart)

    def _can_be_made_again(self, held: HeldObject) -> bool:
        if held.permanent or held.recipe is not None:
            return True
        if held.number not in self._warned:
            self._warned.add(held.number)
            log.warning(
                "%s is not saved: it was made of objects without a name, which a restart cannot make again",
                held.name,
                extra={"event": "not-saved", "object": held.name},
            )
        return False

    def _unclaimed_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        names = {held.name for held in self._objects.named()}
        for uid, (modules, since) in list(self._unclaimed.items()):
            state = self._objects.saved_optimizers.get(uid)
            if state is None or time.time() - since > _UNCLAIMED_SECONDS or not names.issuperset(modules):
                self._objects.saved_optimizers.pop(uid, None)
                del self._unclaimed[uid]
            else:
                yield uid, {"uid": uid, "modules": modules, "since": since, "state": state}

    # -- restoring

    def _restore(self) -> None:
        with SnapshotReader(self._path, "state") as snapshot:
            misfits: list[str] = []
            for encoded in snapshot.state["objects"]:
                entry = snapshot.get(encoded)
                try:
                    restore_object(entry, self._objects, self._make_again)
                except Misfit as error:
                    misfits.append(f"{entry['name']} ({entry['class_name']}): {error}")
            if misfits:
                raise StateError(
                    f"the state in {self._path} does not fit what is served. {'; '.join(misfits)}. Serve "
                    f"what it was saved from. {self._how_to_go_on()}"
                )
            for encoded in snapshot.state["optimizers"]:
                saved = snapshot.get(encoded, copy=True)
                self._objects.saved_optimizers[saved["uid"]] = saved["state"]
                self._unclaimed[saved["uid"]] = (saved["modules"], saved["since"])
        names = sorted(held.name for held in self._objects.named())
        log.info(
            "restored %s from %s",
            ", ".join(names) or "nothing",
            self._path,
            extra={"event": "restored", "objects": names, "optimizers": sorted(self._unclaimed)},
        )


class _Group:
    """Objects to be copied at one moment."""

    def __init__(self, held: list[HeldObject], optimizers: list[WorkerOptimizer]) -> None:
        self.held = {one.number: one for one in held}
        self.optimizers = optimizers
        self.locks = {lock for one in held for lock in one.locks}

    @classmethod
    def joined(cls, groups: list[_Group]) -> _Group:
        return cls(
            [held for group in groups for held in group.held.values()],
            [optimizer for group in groups for optimizer in group.optimizers],
        )

    def touches(self, other: _Group) -> bool:
        return bool(self.held.keys() & other.held.keys() or self.locks & other.locks)

    def marks(self) -> list[Mark]:
        """What tells whether anything of it has changed."""
        of_optimizers = [Mark((optimizer.uid, optimizer.changes)) for optimizer in self.optimizers]
        return [mark_of(held) for held in self.held.values()] + of_optimizers

    def copy(self, access: Access) -> tuple[list[Mark], list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """Its marks, objects and optimizers, all of one moment."""
        turn = access.turn(frozenset(self.locks), time.monotonic() + _PATIENCE_SECONDS)
        if turn is None:
            names = ", ".join(held.name for held in self.held.values())
            raise StateError(f"the state was not saved: {names} did not come to rest between two steps")
        with turn:
            marks = self.marks()
            objects = [copied_object(held) for held in self.held.values()]
            optimizers = {
                optimizer.uid: {
                    "uid": optimizer.uid,
                    "modules": [held.name for held in optimizer.modules],
                    "since": time.time(),
                    "state": optimizer.copied_state(),
                }
                for optimizer in self.optimizers
            }
        return marks, objects, optimizers
