"""How much a worker holds for others: past these limits calls are refused, and say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.errors import ResourceExhausted

if TYPE_CHECKING:  # only then: the command line shows these limits, and must not wait for torch
    from gradwire.autograd import DistAutogradContainer
    from gradwire_server.objects.store import ObjectStore

__all__ = ["HoldLimits"]

_COME_AGAIN_SECONDS = 0.1
"""Others may let go of theirs meanwhile."""
_LET_GO_SECONDS = 1.0
"""What a client drops, it tells within this time."""
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
    """Objects and kept results of all, those with a name included."""
    bytes_per_client: int = 1 << 40
    """Bytes of results that are kept for the backward of one client, and of its objects."""
    bytes: int = 1 << 40
    """The same for all clients together."""

    def check(self, store: DistAutogradContainer, objects: ObjectStore, client: int) -> None:
        """Raises ResourceExhausted if a client may not make the worker hold more."""
        if self._has_room_for_one(store, objects):
            return
        own_bytes = store.result_bytes.of(client) + objects.bytes.of(client)
        if store.counts.of(client) > self.contexts_per_client:
            raise _too_much_for_one(store.counts.of(client), "contexts", self.contexts_per_client, "end some")
        if objects.counts.of(client) > self.objects_per_client:
            raise _too_much_for_one(
                objects.counts.of(client), "objects", self.objects_per_client, "delete some"
            )
        if own_bytes > self.bytes_per_client:
            advice = "run backward, or drop what is not needed, before calling again"
            raise _too_much_for_one(own_bytes, _BYTES, self.bytes_per_client, advice)
        all_bytes = store.result_bytes.total + objects.bytes.total
        if store.counts.total > self.contexts:
            raise _too_much_for_all(store.counts.total, "contexts", self.contexts)
        if objects.counts.total > self.objects:
            raise _too_much_for_all(objects.counts.total, "objects", self.objects)
        if all_bytes > self.bytes:
            raise _too_much_for_all(all_bytes, _BYTES, self.bytes)

    def _has_room_for_one(self, store: DistAutogradContainer, objects: ObjectStore) -> bool:
        """Whether a single client might hold all that is held: then it need not be worked out who does."""
        contexts, kept = store.counts.total, objects.counts.total
        size = store.result_bytes.total + objects.bytes.total
        return (
            contexts <= self.contexts_per_client
            and contexts <= self.contexts
            and kept <= self.objects_per_client
            and kept <= self.objects
            and size <= self.bytes_per_client
            and size <= self.bytes
        )


def _too_much_for_one(held: int, what: str, limit: int, advice: str) -> ResourceExhausted:
    error = ResourceExhausted(f"{held} {what} are kept here for this client, more than {limit}; {advice}")
    # A hint for whoever has let go of some. Not `not_started`: asking again by itself would not help.
    error.retry_after = _LET_GO_SECONDS
    return error


def _too_much_for_all(held: int, what: str, limit: int) -> ResourceExhausted:
    error = ResourceExhausted(f"{held} {what} are kept here for all clients, more than {limit}")
    error.retry_after = _COME_AGAIN_SECONDS
    error.not_started = True
    return error
