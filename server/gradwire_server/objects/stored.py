"""One object that stays on a worker, and what is kept beside it."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from gradwire.autograd import nbytes
from gradwire_server.objects.access import ParameterSet

__all__ = ["IssuedRef", "Recipe", "StoredObject", "is_data", "parameter_sets_of", "tensor_bytes"]

_DATA = (
    *(type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, slice),
    *(torch.Tensor, torch.dtype, torch.device, numpy.ndarray, numpy.generic, enum.Enum),
)


def is_data(value: object) -> bool:
    """Whether a value is sent by its content, since equal values are interchangeable."""
    return isinstance(value, _DATA)


def tensor_bytes(value: object) -> int:
    """The bytes of a tensor, or of a module's parameters and buffers. Other objects do not show theirs."""
    if isinstance(value, torch.nn.Module):
        return sum(map(nbytes, itertools.chain(value.parameters(), value.buffers())))
    return nbytes(value) if isinstance(value, torch.Tensor) else 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """The call that made an object, kept so that the object can be recreated after a restart."""

    function_name: str
    request: bytes
    """The call's serialized ForwardWithAutogradRequest. In it refs to objects of this worker have the peer 0,
    because a restarted worker is another peer."""
    attachments: tuple[bytes, ...] = ()
    """The large tensors of the request."""


@dataclass(slots=True, eq=False)
class StoredObject:
    """An object in an `ObjectStore`, with its owner, its name and its use."""

    number: int
    """Counted: objects that were made later have higher numbers."""
    handle: int
    """What refs name it by, if it has no name. It cannot be guessed: only who was given a ref can use the
    object."""
    value: Any
    owner: int | None
    """The peer id of the client that made the object; None if the object belongs to all clients."""
    name: str = ""
    permanent: bool = False
    """Whether the worker's own code exposed the object."""
    allow_stale: bool = False
    """Whether a backward may run after the parameters that its forward used were changed."""
    recipe: Recipe | None = None
    parameter_sets: frozenset[ParameterSet] = field(default_factory=frozenset)
    """The sets that its parameters belong to. Modules that share parameters share sets."""
    bytes: int = 0
    """The result of `tensor_bytes` when the object was added."""
    last_used: float = field(default_factory=time.monotonic)
    users: int = 0
    """How many calls run on the object now."""
    release_numbers: set[int] = field(default_factory=set)
    """The release numbers of issued refs that were not released yet. The object is dropped with the last of
    them. Refs to an object that has a name have no release numbers."""
    changes: int = 0
    """How often the object was changed. The version counters of its parameters do not count all changes where
    `allow_stale` is set."""

    @property
    def label(self) -> str:
        """What to call the object in a message."""
        return self.name or type(self.value).__name__


@dataclass(frozen=True, slots=True)
class IssuedRef:
    """A result that is sent as a ref to a stored object, even if the object is data."""

    stored: StoredObject
    release_number: int = 0
    """What the receiver releases when it no longer needs the ref. 0 if the object has a name."""


def parameter_sets_of(objects: Iterable[StoredObject]) -> frozenset[ParameterSet]:
    """The sets that the parameters of all these objects belong to."""
    return frozenset(parameter_set for stored in objects for parameter_set in stored.parameter_sets)
