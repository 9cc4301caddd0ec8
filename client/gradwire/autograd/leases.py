"""When contexts end: because their owner says so, is gone, or has not used them for the length of a lease."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

from gradwire.autograd.contexts import DistAutogradContainer, DistAutogradContext
from gradwire.errors import GradwireError
from gradwire.proto.v1 import autograd_pb2, link_pb2
from gradwire.system.timers import call_later
from gradwire.transport.base import Link
from gradwire.wire.ids import ContextId

__all__ = ["ContextLeases"]


class ContextLeases:
    """Ends the contexts that a peer holds, on this peer and on the workers that it made calls to in them."""

    def __init__(
        self, peer: int, container: DistAutogradContainer, find_link: Callable[[int], Link | None]
    ) -> None:
        self._peer = peer
        self._container = container
        self._find_link = find_link
        self._closed = False

    def is_linked(self, peer: int) -> bool:
        """Whether there is a link to a peer. Either end may have opened it."""
        return self._find_link(peer) is not None

    def end(self, id: ContextId) -> bool:
        """Ends a context here and on every worker that this peer took it to. Returns whether it was there."""
        context = self._container.end(id)
        if context is None:
            return False
        self._end_elsewhere(context, owner_is_gone=False)
        return True

    def end_unless_linked(self, id: ContextId, requester: int) -> bool:
        """Another peer has lost the owner of a context: ends the context, unless this peer has a link to the
        owner."""
        if not self.is_linked(id.peer):
            return self.end(id)
        return self._container.release_sent_to(requester, id)

    def drop_client(self, client: int, *, is_gone: bool) -> None:
        """A client has no link to this peer any more: drops what was held for it, or sent to it.

        If the client itself lives (`is_gone` is False), contexts that came through other linked peers are
        kept.
        """
        keeps = (lambda _: False) if is_gone else self.is_linked
        for context in self._container.drop_owner(client, keeps):
            self._end_elsewhere(context, owner_is_gone=True)
        self._container.release_sent_to(client)

    def _end_elsewhere(self, context: DistAutogradContext, *, owner_is_gone: bool) -> None:
        request = autograd_pb2.CleanupContextRequest(owner_is_gone=owner_is_gone)
        context.id.write(request.context)
        body = request.SerializeToString()
        for link in list(context.known_workers):
            try:
                link.send_request(link_pb2.METHOD_CLEANUP_CONTEXT, body, timeout=60.0)
            except GradwireError:
                continue  # the worker is gone, and everything with it

    def sweep_every(self, seconds: float) -> None:
        """From now on ends contexts that were not used for a lease of so many seconds, unless they came over
        a link.

        A link has a lease of its own. Clients that call without a link cannot be seen to go away.
        """
        call_later(max(seconds / 4, 0.01), partial(_sweep, weakref.ref(self), seconds))

    def sweep(self, seconds: float) -> bool:
        """Ends the contexts whose lease is over. Returns whether to sweep again."""
        for id in self._container.unused(seconds, self.is_linked):
            if id.peer != self._peer:
                self.end(id)
        return not self._closed

    def close(self) -> None:
        self._closed = True


def _sweep(leases_ref: weakref.ref[ContextLeases], seconds: float) -> None:
    leases = leases_ref()
    if leases is not None and leases.sweep(seconds):
        leases.sweep_every(seconds)
