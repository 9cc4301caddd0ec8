"""Objects that stay on the worker: what classes made, and what was kept by name.

An object without a name belongs to the client that made it, and goes when that client lets go of it or is
gone; nobody else can delete it. Clients without a link cannot be seen to go: what they made goes when it was
not used for the length of the lease. An object with a name is everybody's: it stays until somebody deletes
it. Objects that the worker's own code exposed by name stay as long as the worker.
"""

from __future__ import annotations

import enum
import itertools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.autograd import borrowed_grad, nbytes
from gradwire.errors import AlreadyExists, NotFound, PermissionDenied, StaleParameters, StepRefused
from gradwire.proto.v1 import value_pb2
from gradwire.runtime.scope import current_scope
from gradwire.system.accounting import InUse, Tally
from gradwire.system.timers import call_later
from gradwire.torch_internals import preserving_versions
from gradwire_server.objects.access import Access, ParameterLock, Reading

if TYPE_CHECKING:
    from gradwire_server.objects.optimizers import WorkerOptimizer

__all__ = ["HeldObject", "KeptResult", "ObjectStore", "Recipe", "is_data"]

log = logging.getLogger("gradwire.server")

_PATIENCE_SECONDS = 60.0
"""How long what has no deadline waits for a step that was prepared."""

_DATA = (
    *(type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, slice),
    *(torch.Tensor, torch.dtype, torch.device, numpy.ndarray, numpy.generic, enum.Enum),
)


def is_data(value: object) -> bool:
    """Whether a value is what it holds: two that are equal are as good as one."""
    return isinstance(value, _DATA)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an object was made, so that it can be made again after a restart."""

    class_name: str
    arguments: bytes
    """The serialized ForwardWithAutogradRequest that made it. Refs to objects here have the peer 0."""
    attachments: tuple[bytes, ...] = ()
    """The large tensors of the request."""


@dataclass(slots=True, eq=False)
class HeldObject:
    """One object."""

    number: int
    value: Any
    owner: int | None
    """The client's peer; None if it is everybody's."""
    name: str = ""
    permanent: bool = False
    """Exposed by the worker's own code."""
    allow_stale: bool = False
    recipe: Recipe | None = None
    locks: frozenset[ParameterLock] = field(default_factory=frozenset)
    """Those of its parameters. Modules that share parameters share locks."""
    bytes: int = 0
    """Of its tensors, as far as they can be seen."""
    last_used: float = field(default_factory=time.monotonic)
    users: int = 0
    """Calls that run on it."""
    handles: set[int] = field(default_factory=set)
    """The refs to it that were sent and not yet let go of. With the last it goes. None if it has a name."""
    changes: int = 0
    """How often it was changed. Version counters do not tell where stale parameters are allowed."""


@dataclass(frozen=True, slots=True)
class KeptResult:
    """A result that is sent as the ref to it, whatever it is."""

    held: HeldObject
    handle: int = 0
    """The ref that it is sent as, to be let go of. 0 if the object has a name."""


class ObjectStore:
    """The objects of one worker, found by number or by name."""

    def __init__(
        self, peer: int, new_number: Callable[[], int], method_names: Callable[[type], Iterable[str]]
    ) -> None:
        self.peers = {peer}
        """The peers that serve them, in whose name refs to them were sent."""
        self._new_number = new_number
        self._method_names = method_names
        """Those that others may call, of a class."""
        self._lock = threading.Lock()
        self._held: dict[int, HeldObject] = {}
        self._names: dict[str, HeldObject] = {}
        self._handles: dict[int, HeldObject] = {}
        self._by_identity: dict[int, list[HeldObject]] = {}
        self._locks: MutableMapping[torch.Tensor, ParameterLock] = WeakTensorKeyDictionary()
        self.access = Access()
        self.counts = Tally()
        """Of objects, by their owners."""
        self.bytes = Tally()
        """Of their tensors."""
        self.optimizers: weakref.WeakSet[WorkerOptimizer] = weakref.WeakSet()
        self.saved_optimizers: dict[str, dict[str, Any]] = {}
        """What was restored at start of optimizers, until their trainers come back for it."""
        self.are_saved = False
        """Whether named objects are made again after a restart, so that it is kept how they were made."""

    def keep(
        self,
        value: object,
        *,
        owner: int | None,
        name: str = "",
        permanent: bool = False,
        allow_stale: bool = False,
        recipe: Recipe | None = None,
    ) -> HeldObject:
        """Keeps an object. With a name it is everybody's; raises AlreadyExists if the name is taken."""
        with self._lock:
            return self._keep(value, owner, name, permanent, allow_stale, recipe)

    def hand_out(
        self,
        value: object,
        *,
        owner: int | None,
        name: str = "",
        allow_stale: bool = False,
        recipe: Recipe | None = None,
    ) -> KeptResult:
        """Keeps an object for a ref that will be sent, until whoever gets the ref lets go of it.

        All in one: an object that is kept already cannot go before its new ref does.
        """
        with self._lock:
            return self._hand_out(self._keep(value, owner, name, False, allow_stale, recipe))

    def hand_out_again(self, value: object, *, owner: int | None) -> KeptResult | None:
        """The same for an object that somebody has already; None if nobody has."""
        with self._lock:
            if id(value) not in self._by_identity:
                return None
            # The requester's own from now on, too: it must not go with whoever got it first.
            return self._hand_out(self._keep(value, owner))

    def _hand_out(self, held: HeldObject) -> KeptResult:
        """With the lock held."""
        held.last_used = time.monotonic()
        if held.name:
            return KeptResult(held)  # it stays whoever lets go of it
        # Not counted, as messages are: several peers release by numbers of their own.
        handle = secrets.randbits(63) | 1 << 63
        held.handles.add(handle)
        self._handles[handle] = held
        return KeptResult(held, handle)

    def _keep(
        self,
        value: object,
        owner: int | None,
        name: str = "",
        permanent: bool = False,
        allow_stale: bool = False,
        recipe: Recipe | None = None,
    ) -> HeldObject:
        """With the lock held."""
        if name and name in self._names:
            raise AlreadyExists(f"an object named {name!r} is there already")
        same = [] if is_data(value) else self._by_identity.get(id(value), [])
        for known in same:
            if not name and (known.name or known.owner == owner):
                return known
        held = HeldObject(
            self._new_number(),
            value,
            None if name else owner,
            name,
            permanent,
            allow_stale=allow_stale,
            recipe=recipe,
            locks=self._locks_of(value),
            bytes=_tensor_bytes(value),
        )
        self._held[held.number] = held
        if not permanent:
            self.counts.add(held.owner, 1)
            self.bytes.add(held.owner, held.bytes)
        if not is_data(value):
            # Named ones first: they are what others know it by.
            self._by_identity[id(value)] = [held, *same] if name else [*same, held]
        if name:
            self._names[name] = held
        return held

    def _locks_of(self, value: object) -> frozenset[ParameterLock]:
        if not isinstance(value, torch.nn.Module):
            return frozenset()
        parameters = list(value.parameters())
        new = ParameterLock()
        for parameter in parameters:
            self._locks.setdefault(parameter, new)
        return frozenset(self._locks[parameter] for parameter in parameters)

    @property
    def has_prepared_steps(self) -> bool:
        """Whether a trainer has yet to say what becomes of a step that was prepared."""
        return any(optimizer.is_prepared for optimizer in list(self.optimizers))

    def find(self, ref: value_pb2.RemoteRef) -> HeldObject:
        """The object that a ref names."""
        with self._lock:
            held = self._names.get(ref.name) if ref.name else self._held.get(ref.ref)
            if held is not None:
                held.last_used = time.monotonic()
        if held is None or (not ref.name and ref.peer.id not in self.peers):
            what = f"object named {ref.name!r}" if ref.name else f"{ref.class_name or 'object'} {ref.ref}"
            raise NotFound(
                f"there is no {what} here: it was deleted, its lease ran out, or the worker was restarted"
            )
        return held

    def of(self, value: object) -> HeldObject | None:
        """The entry of an object, if it is kept."""
        if is_data(value):
            return None
        with self._lock:
            found = self._by_identity.get(id(value))
            return found[0] if found else None

    def ref(self, kept: KeptResult, peer: int) -> value_pb2.RemoteRef:
        """A ref to be sent by a peer: whoever gets it says to that one when it lets go of it."""
        held = kept.held
        return value_pb2.RemoteRef(
            peer=value_pb2.PeerId(id=peer),
            ref=held.number,
            handle=kept.handle,
            class_name=type(held.value).__name__,
            name=held.name,
            is_module=isinstance(held.value, torch.nn.Module),
            methods=self._method_names(type(held.value)),
        )

    def in_use(self, held: HeldObject | None) -> InUse:
        """While a call runs on an object. None: on none."""
        return InUse(self._lock, held)

    def backward_through(self, leaves: Sequence[Node]) -> AbstractContextManager[object]:
        """To be entered around a backward, of whose leaves some may be parameters of modules here.

        Who ends it learns whether it took so long that parameters were changed meanwhile.
        """
        found = (self._locks.get(leaf.variable) for leaf in leaves)  # type: ignore[attr-defined]
        reading = self.access.reading(lock for lock in found if lock is not None)
        return nullcontext() if reading is None else _not_overtaken(reading)

    @contextmanager
    def unchanging(self, values: Iterable[object]) -> Iterator[None]:
        """No optimizer changes these objects meanwhile.

        Waits for a step that is being made or prepared, but not for ever: its trainer may have stalled.
        """
        found = [held for held in map(self.of, values) if held is not None]
        limit = current_scope().deadline
        locks = frozenset(lock for held in found for lock in held.locks)
        turn = self.access.turn(locks, time.monotonic() + _PATIENCE_SECONDS if limit is None else limit)
        if turn is None:
            names = ", ".join(held.name or type(held.value).__name__ for held in found[:5])
            error = StepRefused(f"{names}: a trainer is about to step, and does not go on")
            error.reason = "busy"
            raise error
        with turn:
            yield

    @contextmanager
    def changing(self, values: Iterable[object]) -> Iterator[None]:
        """The same for who changes them: nobody computes with them meanwhile, either."""
        found = [held for held in map(self.of, values) if held is not None]
        with self.unchanging(values), self.being_changed(found):
            yield

    @contextmanager
    def stepping(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """For a served function that steps parameters, of which some may be those of modules here."""
        locks = {lock for parameter in parameters if (lock := self._locks.get(parameter)) is not None}
        with self._lock:
            found = [held for held in self._held.values() if not held.locks.isdisjoint(locks)]
        # `.grad` only after the turn: whoever has the turn needs it to end that.
        with self.unchanging([held.value for held in found]), borrowed_grad(parameters):
            with self.being_changed(found):
                yield

    @contextmanager
    def being_changed(self, changed: Sequence[HeldObject]) -> Iterator[None]:
        """For who has the turn to change objects: nobody computes with their parameters meanwhile."""
        lenient = [held for held in changed if held.allow_stale]
        parameters = tuple(parameter for held in lenient for parameter in held.value.parameters())
        with self.access.changing(frozenset(lock for held in changed for lock in held.locks)):
            # A backward of an older forward then uses the new values: that is what was asked for.
            try:
                with preserving_versions(parameters) if parameters else nullcontext():
                    yield
            finally:
                for held in changed:
                    held.changes += 1
                for lock in {lock for held in lenient for lock in held.locks}:
                    lock.unversioned_changes += 1

    def named(self) -> list[HeldObject]:
        with self._lock:
            return list(self._names.values())

    def live_optimizers(self) -> list[WorkerOptimizer]:
        """All optimizers whose trainers are still there."""
        while True:
            try:
                return sorted(self.optimizers, key=lambda optimizer: optimizer.uid)
            except RuntimeError:
                continue  # another one was made meanwhile

    def delete(self, held: HeldObject, requester: int) -> None:
        """Lets go of an object for good, if the client that asks may do that."""
        if held.permanent:
            raise PermissionDenied(f"{held.name!r} is exposed by the worker itself and cannot be deleted")
        if not held.name and held.owner != requester:
            raise PermissionDenied(f"this {type(held.value).__name__} belongs to another client")
        self._drop(lambda: [held])

    def release(self, handles: Iterable[int]) -> None:
        """A client lets go of refs. Those that it has let go of before make no difference."""

        def unused() -> Iterator[HeldObject]:
            for handle in handles:
                held = self._handles.pop(handle, None)
                if held is not None:
                    held.handles.discard(handle)
                    if not held.handles:
                        yield held

        self._drop(unused)

    def drop_owner(self, peer: int) -> None:
        self._drop(lambda: [held for held in self._held.values() if held.owner == peer])

    def keep_lease(self, seconds: float, is_linked: Callable[[int], bool]) -> None:
        """From now on lets go of what `drop_unused` finds."""
        call_later(max(seconds / 4, 0.01), partial(_sweep, weakref.ref(self), seconds, is_linked))

    def drop_unused(self, seconds: float, is_linked: Callable[[int], bool]) -> None:
        """Lets go of objects that were not used for so long, and whose clients cannot be seen to go."""
        before = time.monotonic() - seconds

        def unused() -> list[HeldObject]:
            return [
                held
                for held in self._held.values()
                if held.owner is not None and not held.users and held.last_used < before
            ]

        with self._lock:
            owners = {held.owner for held in unused()}
        gone = {owner for owner in owners if owner is not None and not is_linked(owner)}
        # Looked for again: some may have been used, or handed out, meanwhile.
        self._drop(lambda: [held for held in unused() if held.owner in gone])

    def _drop(self, find: Callable[[], Iterable[HeldObject]]) -> None:
        """Lets go of objects. What is found is gone when the lock is: nobody can be handed it any more."""
        with self._lock:
            unused = []
            for held in [held for held in find() if self._held.pop(held.number, None) is not None]:
                if not held.permanent:
                    self.counts.add(held.owner, -1)
                    self.bytes.add(held.owner, -held.bytes)
                for handle in held.handles:
                    self._handles.pop(handle, None)
                others = [one for one in self._by_identity.pop(id(held.value), []) if one is not held]
                if others:
                    self._by_identity[id(held.value)] = others
                else:
                    unused.append(held.value)
                if self._names.get(held.name) is held:
                    del self._names[held.name]
        for value in unused:
            close = getattr(value, "gradwire_close", None)
            if callable(close):
                try:
                    close()
                except Exception:
                    # The others that go with it must go, too.
                    log.exception("closing a %s failed", type(value).__name__)


@contextmanager
def _not_overtaken(reading: Reading) -> Iterator[None]:
    with reading:
        yield
    if reading.is_overtaken:
        raise StaleParameters(
            "an optimizer step was made during this backward, since that took too long to wait for; run the "
            "forward again"
        )


def _sweep(objects_ref: weakref.ref[ObjectStore], seconds: float, is_linked: Callable[[int], bool]) -> None:
    objects = objects_ref()
    if objects is not None:
        objects.drop_unused(seconds, is_linked)
        objects.keep_lease(seconds, is_linked)


def _tensor_bytes(value: object) -> int:
    if isinstance(value, torch.nn.Module):
        return sum(map(nbytes, itertools.chain(value.parameters(), value.buffers())))
    return nbytes(value) if isinstance(value, torch.Tensor) else 0
