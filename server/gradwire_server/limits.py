"""How much a worker holds for others: past these limits calls are refused, and say so."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.autograd import ContextStore
from gradwire.errors import ResourceExhausted
from gradwire_server.objects import Objects

__all__ = ["HoldLimits"]

_COME_AGAIN_SECONDS = 0.1


@dataclass(frozen=True)
class HoldLimits:
    """What a worker keeps in memory for its clients between their calls."""

    contexts_per_client: int = 10_000
    """Contexts of one client."""
    objects_per_client: int = 10_000
    """Objects and kept results of one client that have no name."""
    bytes_per_client: int = 1 << 40
    """Bytes of results that are kept for the backward of one client."""
    bytes: int = 1 << 40
    """The same for all clients together."""

    def check(self, store: ContextStore, objects: Objects, client: int) -> None:
        """Raises ResourceExhausted if a client may not make the worker hold more."""
        contexts, held = store.held_by(client)
        if contexts > self.contexts_per_client:
            raise ResourceExhausted(
                f"this client has {contexts} contexts here, more than {self.contexts_per_client}; end some"
            )
        if held > self.bytes_per_client:
            raise ResourceExhausted(
                f"{held} bytes of results are kept here for this client's backward, more than "
                f"{self.bytes_per_client}; run backward, or drop what is not needed, before calling again"
            )
        if store.held_bytes() > self.bytes:
            error = ResourceExhausted(
                f"{store.held_bytes()} bytes of results are kept here for all clients, more than {self.bytes}"
            )
            # Others may let go of theirs meanwhile.
            error.retry_after = _COME_AGAIN_SECONDS
            error.not_started = True
            raise error
        if objects.count(client) > self.objects_per_client:
            raise ResourceExhausted(
                f"this client has more than {self.objects_per_client} objects here; delete some"
            )
