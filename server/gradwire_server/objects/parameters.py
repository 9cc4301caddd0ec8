"""The parameters of a worker's modules, guarded so that nothing computes with them while they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.autograd import borrowed_grad
from gradwire.errors import StaleParameters, StepRefused
from gradwire.runtime.scope import current_scope
from gradwire.torch_internals import preserving_versions
from gradwire_server.objects.access import ParameterAccess, ParameterSet, ReadGuard
from gradwire_server.objects.stored import StoredObject, parameter_sets_of

__all__ = ["StoredParameters"]

_RESERVATION_SECONDS = 60.0
"""How long a request without a deadline waits for a trainer that has prepared a step."""


class StoredParameters:
    """Guards the parameters of the modules in one `ObjectStore`."""

    def __init__(self, stored_objects: Callable[[], list[StoredObject]]) -> None:
        self._stored_objects = stored_objects
        self._set_of: MutableMapping[torch.Tensor, ParameterSet] = WeakTensorKeyDictionary()
        self.access = ParameterAccess()

    def add(self, value: object) -> frozenset[ParameterSet]:
        """The sets that an object's parameters belong to. Parameters that belong to none make a new one."""
        if not isinstance(value, torch.nn.Module):
            return frozenset()
        parameters = list(value.parameters())
        new = ParameterSet()
        for parameter in parameters:
            self._set_of.setdefault(parameter, new)
        return frozenset(self._set_of[parameter] for parameter in parameters)

    def read_by_call(self, used: Sequence[StoredObject]) -> ReadGuard | None:
        """The guard to enter around a call that uses these objects; None if they have no parameters."""
        return self.access.read(parameter_sets_of(used)) if used else None

    def read_by_backward(self, leaves: Sequence[Node]) -> AbstractContextManager[object]:
        """A context manager around a backward that ends in these leaves, some of which may be parameters
        here.

        It raises StaleParameters at the end if the backward took so long that parameters were written
        meanwhile.
        """
        if not self._set_of:  # asked first, because a look-up in such a dictionary is slow
            return nullcontext()
        found = (self._set_of.get(leaf.variable) for leaf in leaves)  # type: ignore[attr-defined]
        guard = self.access.read(parameter_set for parameter_set in found if parameter_set is not None)
        return nullcontext() if guard is None else _not_overtaken(guard)

    @contextmanager
    def reserved(self, objects: Sequence[StoredObject]) -> Iterator[None]:
        """Keeps optimizers from changing these objects meanwhile.

        Waits for a step that is being made or prepared, but not for ever: its trainer may have stalled.
        """
        deadline = current_scope().deadline
        give_up_at = time.monotonic() + _RESERVATION_SECONDS if deadline is None else deadline
        reservation = self.access.reserve(parameter_sets_of(objects), give_up_at)
        if reservation is None:
            labels = ", ".join(stored.label for stored in objects[:5])
            error = StepRefused(
                f"{labels}: a trainer has prepared a step, and neither makes it nor gives it up"
            )
            error.reason = "busy"
            raise error
        with reservation:
            yield

    @contextmanager
    def reserved_and_written(self, objects: Sequence[StoredObject]) -> Iterator[None]:
        """Reserves these objects and changes them: nothing computes with them meanwhile, either."""
        with self.reserved(objects), self.written(objects):
            yield

    @contextmanager
    def stepping(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Around the optimizer step of a served function, whose parameters may belong to modules here."""
        parameter_sets = {
            parameter_set
            for parameter in parameters
            if (parameter_set := self._set_of.get(parameter)) is not None
        }
        found = [
            stored
            for stored in self._stored_objects()
            if not stored.parameter_sets.isdisjoint(parameter_sets)
        ]
        # `.grad` is borrowed only after the reservation: the trainer that holds the reservation needs `.grad`
        # to make its step.
        with self.reserved(found), borrowed_grad(parameters):
            with self.written(found):
                yield

    @contextmanager
    def written(self, objects: Sequence[StoredObject]) -> Iterator[None]:
        """Around a change of objects that the caller has reserved: nothing computes with them meanwhile."""
        allowing_stale = [stored for stored in objects if stored.allow_stale]
        parameters = tuple(parameter for stored in allowing_stale for parameter in stored.value.parameters())
        with self.access.write(parameter_sets_of(objects)):
            # With its version counters put back, torch lets a backward of an older forward use the new
            # values: that is what `allow_stale` asks for.
            try:
                with preserving_versions(parameters) if parameters else nullcontext():
                    yield
            finally:
                for stored in objects:
                    stored.changes += 1
                for parameter_set in parameter_sets_of(allowing_stale):
                    parameter_set.unversioned_writes += 1


@contextmanager
def _not_overtaken(guard: ReadGuard) -> Iterator[None]:
    with guard:
        yield
    if guard.is_overtaken:
        raise StaleParameters(
            "an optimizer step was made during this backward, which took too long to wait for; run the "
            "forward again"
        )
