"""Telling other peers which of their messages nothing here refers to any more.

Releases ride on messages that travel anyway; releases that find no such message are
sent on their own after a second. If a release is lost, the lease (`leases`) frees the message in the end.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gradwire.autograd.contexts import DistAutogradContainer
from gradwire.autograd.responses import Response, releases_of_discarded
from gradwire.errors import GradwireError, MalformedMessage
from gradwire.proto.v1 import autograd_pb2, link_pb2
from gradwire.system.timers import call_later
from gradwire.transport.base import Link, Payload, ResponseFuture, ServerCall
from gradwire.wire.ids import AutogradMessageId, message_protos

if TYPE_CHECKING:
    from gradwire.autograd.kept_state.graph_segments import SegmentHandle

__all__ = ["HandleReference", "PeerReleases", "Releases"]

_FLUSH_SECONDS = 1.0
"""After this time, releases that found no message to ride on are sent on their own."""
_MAX_IN_ONE_MESSAGE = 1000
"""How many releases ride on a message at most, so that they do not make it much larger."""


class HandleReference(weakref.ref["SegmentHandle"]):
    """A weak reference to a segment handle that another peer was told of. Its callback is called when
    nothing on this peer refers to the handle any more."""

    __slots__ = ("__weakref__", "id")
    id: AutogradMessageId


class PeerReleases:
    """Messages of another peer that nothing on this peer refers to any more: that peer is to be told.

    `append` and what `on_discarded` returns are called by destructors, at any moment and in any thread, so
    they do nothing but append.
    """

    def __init__(self, all_handles: MutableMapping[AutogradMessageId, HandleReference]) -> None:
        self._all_handles = all_handles
        self._handles: dict[AutogradMessageId, HandleReference] = {}
        self._waiting: deque[AutogradMessageId | HandleReference] = deque()
        self._discarded: deque[tuple[type[Any], bytes]] = deque()
        self.append = self._waiting.append

    def on_discarded(self, kind: type[Any]) -> Callable[[Payload], None]:
        """Takes responses of a kind that came after their future was cancelled or dropped."""
        return lambda response: self._discarded.append((kind, response.body))

    def take_discarded(self) -> list[tuple[type[Any], bytes]]:
        return _taken(self._discarded)

    def take(self) -> list[AutogradMessageId]:
        if not self._waiting:
            return []
        return [
            self._handles.pop(released.id).id if isinstance(released, HandleReference) else released
            for released in _taken(self._waiting)
        ]

    def offer(self, handle: SegmentHandle) -> None:
        """Notes that the other peer is told of a segment handle. It is told again when nothing here refers to
        the handle any more."""
        # Not by a method: it would be called where graphs are destroyed, in the middle of C++ code that an
        # interpreter which shuts down must not leave.
        reference = self._handles[handle.id] = HandleReference(handle, self._waiting.append)
        reference.id = handle.id
        self._all_handles[handle.id] = reference


_Item = TypeVar("_Item")


def _taken(waiting: deque[_Item]) -> list[_Item]:
    taken: list[_Item] = []
    while len(taken) < _MAX_IN_ONE_MESSAGE:
        try:
            taken.append(waiting.popleft())
        except IndexError:
            break
    return taken


class Releases:
    """The releases of one peer, for every link that it has."""

    def __init__(self, container: DistAutogradContainer) -> None:
        self._container = container
        self._lock = threading.Lock()

    def to(self, link: Link) -> PeerReleases:
        """The releases for the peer at the other end of a link."""
        releases: PeerReleases | None = link.upper_state
        if releases is None:
            with self._lock:
                releases = link.upper_state = link.upper_state or self._new(link)
        return releases

    def _new(self, link: Link) -> PeerReleases:
        call_later(_FLUSH_SECONDS, partial(self._flush, weakref.ref(link)))
        return PeerReleases(self._container.handles)

    def undo_if_failed(
        self,
        future: ResponseFuture,
        link: Link,
        sent: AutogradMessageId | None,
        released: Sequence[AutogradMessageId],
    ) -> None:
        """Arranges what to undo if a request fails, since the other peer may never have seen it.

        The arguments that it sent are released here. Its releases are queued again; repeating them is
        harmless. If the other peer kept something of the arguments before it failed, a later backward through
        that is refused.
        """
        # Weakly: a future keeps its callbacks, and would keep itself.
        settled = weakref.ref(future)
        releases = self.to(link)

        def undo() -> None:
            future = settled()
            if future is not None and (future.cancelled() or future.exception() is not None):
                if sent is not None:
                    self._container.release([sent])
                for id in released:
                    releases.append(id)

        future.when_settled(undo)

    def respond(self, server_call: ServerCall, response: Response) -> bool:
        """Sends a response that carries the waiting releases. Returns whether the requester gets it.

        If it does not, or if it cancels, the releases are queued again and the results are released.
        """
        link = server_call.link
        releases = None if link is None else self.to(link)
        released = [] if releases is None else releases.take()
        results = []
        if response.metadata is not None and response.metadata.message is not None:
            results.append(response.metadata.message)

        def undo() -> None:
            self._container.release(results)
            if releases is not None:
                for id in released:
                    releases.append(id)

        is_sent = False
        try:
            is_sent = server_call.respond(response.body(released), response.attachments)
        finally:
            if not is_sent:
                undo()
        if is_sent and link is not None and (released or results):
            server_call.when_cancelled(undo)
        return is_sent

    def _flush(self, link_ref: weakref.ref[Link]) -> None:
        link = link_ref()
        if link is None or link.ended is not None:
            return
        try:
            self._flush_now(link, self.to(link))
        finally:
            call_later(_FLUSH_SECONDS, partial(self._flush, link_ref))

    def _flush_now(self, link: Link, releases: PeerReleases) -> None:
        while discarded := releases.take_discarded():
            for kind, body in discarded:
                self._release_discarded(kind, body, releases)
        released = releases.take()
        if not released:
            return
        request = autograd_pb2.CleanupContextRequest(messages=message_protos(released))
        body = request.SerializeToString()
        future = ResponseFuture()
        self.undo_if_failed(future, link, None, released)
        try:
            link.send_request(link_pb2.METHOD_CLEANUP_CONTEXT, body, timeout=60.0, future=future)
        except GradwireError:
            # Nothing was sent: the link may be cut, and does not wait. The next flush tries again.
            for id in released:
                releases.append(id)

    def _release_discarded(self, kind: type[Any], body: bytes, releases: PeerReleases) -> None:
        """Releases the messages and refs in a response that no future will decode."""
        try:
            here, there = releases_of_discarded(kind, body)
        except MalformedMessage:
            return
        self._container.release(here)
        for id in there:
            releases.append(id)
