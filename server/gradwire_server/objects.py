"""Objects that stay on the worker: what classes made, and what was kept by name.

An object without a name belongs to the client that made it, and goes when that client lets go of it or is
gone. An object with a name is everybody's: it stays until somebody deletes it. Objects that the worker's own
code exposed by name stay as long as the worker.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gradwire.errors import AlreadyExists, NotFound, PermissionDenied, UnknownFunction
from gradwire.proto.v1 import value_pb2
from gradwire_server.registry import Served, method_names

if TYPE_CHECKING:
    from gradwire_server.optimizers import WorkerOptimizer

__all__ = ["Held", "Objects", "Recipe", "method_of"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an object was made, so that it can be made again after a restart."""

    class_name: str
    arguments: bytes
    """The serialized ForwardWithAutogradRequest that made it."""


@dataclass(slots=True, eq=False)
class Held:
    """One object."""

    number: int
    value: Any
    owner: int | None
    """The client's node; None if it is everybody's."""
    name: str = ""
    permanent: bool = False
    """Exposed by the worker's own code."""
    allow_stale: bool = False
    recipe: Recipe | None = None
    step_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while an optimizer changes it, and while it is saved."""


class Objects:
    """The objects of one worker, found by number or by name."""

    def __init__(self, node: int, new_number: Callable[[], int]) -> None:
        self._node = node
        self._new_number = new_number
        self._lock = threading.Lock()
        self._held: dict[int, Held] = {}
        self._names: dict[str, Held] = {}
        self._by_identity: dict[int, Held] = {}
        self.optimizers: weakref.WeakSet[WorkerOptimizer] = weakref.WeakSet()
        self.saved_optimizers: dict[str, dict[str, Any]] = {}
        """What was restored at start of optimizers, until their trainers come back for it."""

    def keep(
        self,
        value: object,
        *,
        owner: int | None,
        name: str = "",
        permanent: bool = False,
        allow_stale: bool = False,
        recipe: Recipe | None = None,
    ) -> Held:
        """Keeps an object. With a name it is everybody's; raises AlreadyExists if the name is taken."""
        with self._lock:
            if name and name in self._names:
                raise AlreadyExists(f"an object named {name!r} is there already")
            known = self._by_identity.get(id(value))
            if known is not None and not name:
                return known
            held = Held(
                self._new_number(),
                value,
                None if name else owner,
                name,
                permanent,
                allow_stale=allow_stale,
                recipe=recipe,
            )
            self._held[held.number] = held
            self._by_identity[id(value)] = held
            if name:
                self._names[name] = held
            return held

    def find(self, ref: value_pb2.RemoteRef) -> Held:
        """The object that a ref names."""
        with self._lock:
            held = self._names.get(ref.name) if ref.name else self._held.get(ref.ref)
        if held is None or (not ref.name and ref.node.id != self._node):
            what = f"object named {ref.name!r}" if ref.name else f"{ref.class_name or 'object'} {ref.ref}"
            raise NotFound(
                f"there is no {what} here: it was deleted, its lease ran out, or the worker was restarted"
            )
        return held

    def of(self, value: object) -> Held | None:
        """The entry of an object, if it is kept."""
        with self._lock:
            return self._by_identity.get(id(value))

    def ref(self, held: Held) -> value_pb2.RemoteRef:
        return value_pb2.RemoteRef(
            node=value_pb2.NodeId(id=self._node),
            ref=held.number,
            class_name=type(held.value).__name__,
            name=held.name,
            is_module=isinstance(held.value, torch.nn.Module),
            methods=method_names(type(held.value)),
        )

    @contextmanager
    def unchanging(self, values: Iterable[object]) -> Iterator[None]:
        """No optimizer changes these objects meanwhile."""
        held = {id(value): self.of(value) for value in values}
        with ExitStack() as stack:
            for one in sorted((h for h in held.values() if h is not None), key=lambda h: h.number):
                stack.enter_context(one.step_lock)
            yield

    def named(self) -> list[Held]:
        with self._lock:
            return list(self._names.values())

    def delete(self, held: Held) -> None:
        """Lets go of an object for good."""
        if held.permanent:
            raise PermissionDenied(f"{held.name!r} is exposed by the worker itself and cannot be deleted")
        self._drop([held])

    def release(self, numbers: Iterable[int]) -> None:
        """A client lets go of objects. Those with a name stay."""
        with self._lock:
            dropped = [self._held[number] for number in numbers if number in self._held]
        self._drop([held for held in dropped if not held.name])

    def drop_owner(self, node: int) -> None:
        with self._lock:
            dropped = [held for held in self._held.values() if held.owner == node]
        self._drop(dropped)

    def _drop(self, dropped: list[Held]) -> None:
        with self._lock:
            for held in dropped:
                self._held.pop(held.number, None)
                self._by_identity.pop(id(held.value), None)
                if self._names.get(held.name) is held:
                    del self._names[held.name]
        for held in dropped:
            close = getattr(held.value, "gradwire_close", None)
            if close is not None:
                close()


def method_of(held: Held, name: str, worker: str) -> Served:
    """A method that others may call, as a function of the object: a public one, or calling it."""
    class_ = type(held.value)
    is_public = not name.startswith("_") or name == "__call__"
    # Looked up on the class: what an instance holds in its attributes is not for others to call.
    method = getattr(class_, name, None) if is_public else None
    if not callable(method):
        raise UnknownFunction(f"{class_.__name__} on {worker} has no method {name!r}", worker=worker)
    # A module is called so that its hooks run, but takes the arguments of its forward.
    like = class_.forward if name == "__call__" and isinstance(held.value, torch.nn.Module) else method
    return Served(f"{class_.__name__}.{name}", method, like)
