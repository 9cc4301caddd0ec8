"""Limits of what a worker holds for its clients. Past them calls are refused with ResourceExhausted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.errors import ResourceExhausted

if TYPE_CHECKING:  # only then, because the command line imports this module, and must not wait for torch
    from gradwire.autograd import DistAutogradContainer
    from gradwire_server.objects.store import ObjectStore

__all__ = ["HoldLimits"]

_RETRY_SECONDS = 0.1
"""When to retry a call that was refused because all clients together hold too much: another client may have
released something by then."""
_RELEASE_SECONDS = 1.0
"""When to retry a call whose client holds too much: a release reaches the worker within this time."""
_BYTES = "bytes of results and objects"


@dataclass(frozen=True)
class HoldLimits:
    """What a worker keeps in memory for its clients between their calls."""

    contexts_per_client: int = 10_000
    """Contexts of one client."""
    contexts: int = 100_000
    """The same for all clients together."""
    objects_per_client: int = 10_000
    """Objects and kept results of one client that have no name."""
    objects: int = 100_000
    """Objects and kept results of all clients, those with a name included."""
    bytes_per_client: int = 1 << 40
    """Bytes of results that are kept for the backward of one client, and of its objects."""
    bytes: int = 1 << 40
    """The same for all clients together."""

    def check(self, container: DistAutogradContainer, objects: ObjectStore, client: int) -> None:
        """Raises ResourceExhausted if a client may not make the worker hold more."""
        if self._has_room_for_one(container, objects):
            return
        own_bytes = container.result_bytes.of(client) + objects.bytes.of(client)
        own_contexts, own_objects = container.counts.of(client), objects.counts.of(client)
        if own_contexts > self.contexts_per_client:
            raise _too_much_for_one(own_contexts, "contexts", self.contexts_per_client, "end some")
        if own_objects > self.objects_per_client:
            raise _too_much_for_one(own_objects, "objects", self.objects_per_client, "delete some")
        if own_bytes > self.bytes_per_client:
            advice = "run backward, or drop what is not needed, before calling again"
            raise _too_much_for_one(own_bytes, _BYTES, self.bytes_per_client, advice)
        all_bytes = container.result_bytes.total + objects.bytes.total
        if container.counts.total > self.contexts:
            raise _too_much_for_all(container.counts.total, "contexts", self.contexts)
        if objects.counts.total > self.objects:
            raise _too_much_for_all(objects.counts.total, "objects", self.objects)
        if all_bytes > self.bytes:
            raise _too_much_for_all(all_bytes, _BYTES, self.bytes)

    def _has_room_for_one(self, container: DistAutogradContainer, objects: ObjectStore) -> bool:
        """Whether one client alone could hold everything. Then nothing needs to be looked up by client."""
        contexts, stored = container.counts.total, objects.counts.total
        size = container.result_bytes.total + objects.bytes.total
        return (
            contexts <= self.contexts_per_client
            and contexts <= self.contexts
            and stored <= self.objects_per_client
            and stored <= self.objects
            and size <= self.bytes_per_client
            and size <= self.bytes
        )


def _too_much_for_one(held: int, unit: str, limit: int, advice: str) -> ResourceExhausted:
    error = ResourceExhausted(f"{held} {unit} are kept here for this client, more than {limit}; {advice}")
    # `not_started` stays unset, so that the client does not retry by itself: that would not help before its
    # own program releases something.
    error.retry_after = _RELEASE_SECONDS
    return error


def _too_much_for_all(held: int, unit: str, limit: int) -> ResourceExhausted:
    error = ResourceExhausted(f"{held} {unit} are kept here for all clients, more than {limit}")
    error.retry_after = _RETRY_SECONDS
    error.not_started = True
    return error
