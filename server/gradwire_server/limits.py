"""How much a worker holds for others: past these limits calls are refused, and say so."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.autograd import ContextStore
from gradwire.errors import ResourceExhausted
from gradwire_server.objects import Objects

__all__ = ["HoldLimits"]

_COME_AGAIN_SECONDS = 0.1
"""Others may let go of theirs meanwhile."""
_LET_GO_SECONDS = 1.0
"""What a client drops, it tells within this time."""


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

    def check(self, store: ContextStore, objects: Objects, client: int) -> None:
        """Raises ResourceExhausted if a client may not make the worker hold more."""
        contexts, result_bytes = store.held_by(client)
        owned, object_bytes = objects.held_by(client)
        _check_own("contexts", contexts, self.contexts_per_client, "end some")
        _check_own("objects", owned, self.objects_per_client, "delete some")
        _check_own(
            "bytes of results and objects",
            result_bytes + object_bytes,
            self.bytes_per_client,
            "run backward, or drop what is not needed, before calling again",
        )
        contexts, result_bytes = store.held()
        owned, object_bytes = objects.held()
        _check_all("contexts", contexts, self.contexts)
        _check_all("objects", owned, self.objects)
        _check_all("bytes of results and objects", result_bytes + object_bytes, self.bytes)


def _check_own(what: str, held: int, limit: int, advice: str) -> None:
    if held > limit:
        error = ResourceExhausted(f"{held} {what} are kept here for this client, more than {limit}; {advice}")
        # A hint for whoever has let go of some. Not `not_started`: asking again by itself would not help.
        error.retry_after = _LET_GO_SECONDS
        raise error


def _check_all(what: str, held: int, limit: int) -> None:
    if held > limit:
        error = ResourceExhausted(f"{held} {what} are kept here for all clients, more than {limit}")
        error.retry_after = _COME_AGAIN_SECONDS
        error.not_started = True
        raise error
