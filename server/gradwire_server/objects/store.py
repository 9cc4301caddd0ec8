"""The object store: objects that stay on a worker between calls.

An object without a name belongs to the client that made it. It is dropped when that client releases it or is
gone, and no other client can delete it. A client without a link cannot be seen to go: the objects that it
made are dropped when they were not used for the length of the lease. An object with a name belongs to all
clients, and stays until one of them deletes it. Objects that the worker's own code exposed by name stay as
long as the worker does.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradwire.errors import AlreadyExists, NotFound, PermissionDenied
from gradwire.proto.v1 import value_pb2
from gradwire.system.accounting import InUse, Tally
from gradwire.system.randomness import new_id
from gradwire.system.timers import call_later
from gradwire_server.objects.parameters import StoredParameters
from gradwire_server.objects.stored import IssuedRef, Recipe, StoredObject, is_data, tensor_bytes

if TYPE_CHECKING:
    from gradwire_server.objects.optimizers import WorkerOptimizer

__all__ = ["ObjectOptions", "ObjectStore"]

log = logging.getLogger("gradwire.server")


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """What is asked for when an object is added to the store. `StoredObject` explains each."""

    name: str = ""
    permanent: bool = False
    allow_stale: bool = False
    recipe: Recipe | None = None


_NO_OPTIONS = ObjectOptions()
_NOT_IN_USE = nullcontext()


class ObjectStore:
    """The objects of one worker, found by handle, by name or by the object itself."""

    def __init__(
        self, peer: int, new_number: Callable[[], int], method_names: Callable[[type], Iterable[str]]
    ) -> None:
        self.peers = {peer}
        """The ids of the peers that serve these objects, and that refs to them name."""
        self._new_number = new_number
        self._method_names = method_names
        """The names of the methods of a class that clients may call."""
        self._lock = threading.Lock()
        self._by_handle: dict[int, StoredObject] = {}
        self._by_name: dict[str, StoredObject] = {}
        self._by_release_number: dict[int, StoredObject] = {}
        self._by_identity: dict[int, list[StoredObject]] = {}
        self.parameters = StoredParameters(self._all)
        self.counts = Tally()
        """How many objects each owner has."""
        self.bytes = Tally()
        """How many bytes of tensors each owner has."""
        self.optimizers: weakref.WeakSet[WorkerOptimizer] = weakref.WeakSet()
        self.restored_optimizer_states: dict[str, dict[str, Any]] = {}
        """The states of optimizers that were restored at start, until their trainers come back for them."""
        self.needs_recipes = False
        """Whether named objects are recreated after a restart, and so need their recipes."""

    def add(self, value: object, owner: int | None, options: ObjectOptions = _NO_OPTIONS) -> StoredObject:
        """Stores an object. Raises AlreadyExists if the name is taken."""
        with self._lock:
            return self._add(value, owner, options)

    def issue_ref(self, value: object, owner: int | None, options: ObjectOptions = _NO_OPTIONS) -> IssuedRef:
        """Stores an object for a ref that will be sent, until the receiver releases the ref.

        Adding and issuing are one operation, so that an object which is stored already cannot be dropped
        between the two.
        """
        with self._lock:
            return self._issue(self._add(value, owner, options))

    def issue_ref_if_stored(self, value: object, owner: int | None) -> IssuedRef | None:
        """A ref to an object that is stored already; None if it is not."""
        with self._lock:
            if id(value) not in self._by_identity:
                return None
            # Added for this owner, too: the object must not be dropped with the client that had it first.
            return self._issue(self._add(value, owner, _NO_OPTIONS))

    def _issue(self, stored: StoredObject) -> IssuedRef:
        """The caller holds the lock."""
        stored.last_used = time.monotonic()
        if stored.name:
            return IssuedRef(stored)  # releasing it would not drop the object, so it has no release number
        # Random, with the highest bit set, so that no release number equals the number of a message: both are
        # released by the same requests, and each of the peers that serve these objects counts its own
        # messages.
        release_number = secrets.randbits(63) | 1 << 63
        stored.release_numbers.add(release_number)
        self._by_release_number[release_number] = stored
        return IssuedRef(stored, release_number)

    def _add(self, value: object, owner: int | None, options: ObjectOptions) -> StoredObject:
        """The caller holds the lock."""
        name = options.name
        if name and name in self._by_name:
            raise AlreadyExists(f"an object named {name!r} is there already")
        same = [] if is_data(value) else self._by_identity.get(id(value), [])
        for known in same:
            if not name and (known.name or known.owner == owner):
                return known
        stored = StoredObject(
            self._new_number(),
            new_id(),
            value,
            None if name else owner,
            name,
            options.permanent,
            options.allow_stale,
            options.recipe,
            parameter_sets=self.parameters.add(value),
            bytes=tensor_bytes(value),
        )
        self._by_handle[stored.handle] = stored
        if not stored.permanent:
            self.counts.add(stored.owner, 1)
            self.bytes.add(stored.owner, stored.bytes)
        if not is_data(value):
            # Entries with a name come first: that is the name which clients know the object by.
            self._by_identity[id(value)] = [stored, *same] if name else [*same, stored]
        if name:
            self._by_name[name] = stored
        return stored

    def resolve(self, ref: value_pb2.RemoteRef) -> StoredObject:
        """The object that a ref names. Raises NotFound."""
        with self._lock:
            stored = self._by_name.get(ref.name) if ref.name else self._by_handle.get(ref.ref)
            if stored is not None:
                stored.last_used = time.monotonic()
        if stored is None or (not ref.name and ref.peer.id not in self.peers):
            described = f"object named {ref.name!r}" if ref.name else ref.class_name or "object"
            raise NotFound(
                f"there is no {described} here: it was deleted, its lease ran out, or the worker restarted"
            )
        return stored

    def find(self, value: object) -> StoredObject | None:
        """The entry of an object; None if it is not stored."""
        if is_data(value):
            return None
        with self._lock:
            found = self._by_identity.get(id(value))
            return found[0] if found else None

    def to_proto(self, issued: IssuedRef, peer: int) -> value_pb2.RemoteRef:
        """The message for a ref that a peer sends. The receiver releases the ref at that peer."""
        stored = issued.stored
        return value_pb2.RemoteRef(
            peer=value_pb2.PeerId(id=peer),
            ref=stored.handle,
            release_number=issued.release_number,
            class_name=type(stored.value).__name__,
            name=stored.name,
            is_module=isinstance(stored.value, torch.nn.Module),
            methods=self._method_names(type(stored.value)),
        )

    def in_use(self, stored: StoredObject | None) -> AbstractContextManager[None]:
        """Around a call that runs on an object. None if the call runs on no object."""
        return _NOT_IN_USE if stored is None else InUse(self._lock, stored)

    def named(self) -> list[StoredObject]:
        """All objects that have a name."""
        with self._lock:
            return list(self._by_name.values())

    def _all(self) -> list[StoredObject]:
        with self._lock:
            return list(self._by_handle.values())

    # -- optimizers

    @property
    def has_prepared_steps(self) -> bool:
        """Whether a step was prepared that its trainer has neither committed nor given up."""
        return any(optimizer.is_prepared for optimizer in self.live_optimizers())

    def live_optimizers(self) -> list[WorkerOptimizer]:
        """All optimizers whose trainers are still there."""
        while True:
            try:
                return sorted(self.optimizers, key=lambda optimizer: optimizer.uid)
            except RuntimeError:
                continue  # an optimizer was added during the iteration

    # -- dropping

    def delete(self, stored: StoredObject, requester: int) -> None:
        """Drops an object for good. Raises PermissionDenied if the requester may not do that."""
        if stored.permanent:
            raise PermissionDenied(f"{stored.name!r} is exposed by the worker itself and cannot be deleted")
        if not stored.name and stored.owner != requester:
            raise PermissionDenied(f"this {type(stored.value).__name__} belongs to another client")
        self._drop(lambda: [stored])

    def release(self, release_numbers: Iterable[int]) -> None:
        """Drops objects whose last ref is among these. Refs that were released before make no difference."""

        def without_refs() -> Iterator[StoredObject]:
            for release_number in release_numbers:
                stored = self._by_release_number.pop(release_number, None)
                if stored is not None:
                    stored.release_numbers.discard(release_number)
                    if not stored.release_numbers:
                        yield stored

        self._drop(without_refs)

    def drop_owner(self, peer: int) -> None:
        """Drops all objects of a client that is gone."""
        self._drop(lambda: [stored for stored in self._by_handle.values() if stored.owner == peer])

    def keep_lease(self, seconds: float, is_linked: Callable[[int], bool]) -> None:
        """Calls `drop_unused` regularly from now on."""
        call_later(max(seconds / 4, 0.01), partial(_sweep, weakref.ref(self), seconds, is_linked))

    def drop_unused(self, seconds: float, is_linked: Callable[[int], bool]) -> None:
        """Drops objects that were not used for `seconds` and whose clients have no link."""
        before = time.monotonic() - seconds

        def unused() -> list[StoredObject]:
            return [
                stored
                for stored in self._by_handle.values()
                if stored.owner is not None and not stored.users and stored.last_used < before
            ]

        with self._lock:
            owners = {stored.owner for stored in unused()}
        gone = {owner for owner in owners if owner is not None and not is_linked(owner)}
        # Looked for again: an object may have been used, or a ref to it issued, while the lock was free.
        self._drop(lambda: [stored for stored in unused() if stored.owner in gone])

    def _drop(self, find: Callable[[], Iterable[StoredObject]]) -> None:
        """Drops the objects that `find` returns with the lock held, so that no ref is issued to them
        later."""
        with self._lock:
            dropped_values = []
            for stored in [found for found in find() if self._by_handle.pop(found.handle, None) is not None]:
                if not stored.permanent:
                    self.counts.add(stored.owner, -1)
                    self.bytes.add(stored.owner, -stored.bytes)
                for release_number in stored.release_numbers:
                    self._by_release_number.pop(release_number, None)
                same = self._by_identity.pop(id(stored.value), [])
                remaining = [other for other in same if other is not stored]
                if remaining:
                    self._by_identity[id(stored.value)] = remaining
                else:
                    dropped_values.append(stored.value)
                if self._by_name.get(stored.name) is stored:
                    del self._by_name[stored.name]
        for value in dropped_values:
            close = getattr(value, "gradwire_close", None)
            if callable(close):
                try:
                    close()
                except Exception:
                    # The other objects must be closed nevertheless.
                    log.exception("closing a %s failed", type(value).__name__)


def _sweep(store_ref: weakref.ref[ObjectStore], seconds: float, is_linked: Callable[[int], bool]) -> None:
    store = store_ref()
    if store is not None:
        store.drop_unused(seconds, is_linked)
        store.keep_lease(seconds, is_linked)
