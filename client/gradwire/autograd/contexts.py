"""Contexts: the gradients and messages of one training step, kept apart from those of others.

Each peer has a container. A context exists in the container of every peer that its calls reached, under the
same id. Each client has an ambient context (number 0) for plain `backward()`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.autograd.engine_hooks import EngineHooks
from gradwire.autograd.gradients import added
from gradwire.autograd.kept_state.remote_segments import RemoteGraphSegment, leave_out
from gradwire.autograd.records import ReceivedTensors, SentArguments, SentResults
from gradwire.errors import NotFound, StepRefused
from gradwire.system.accounting import Tally
from gradwire.torch_internals import version_of
from gradwire.transport.base import Link
from gradwire.wire.ids import AutogradMessageId, ContextId

if TYPE_CHECKING:
    from gradwire.autograd.kept_state.suspended import SuspendedBackward
    from gradwire.autograd.releases import HandleReference

__all__ = ["DistAutogradContainer", "DistAutogradContext"]

_REMEMBERED_ENDED = 10_000
"""How many ended contexts are remembered, so that a late call does not make such a context anew."""


class DistAutogradContext:
    """The gradients and messages of a context that this peer holds."""

    def __init__(self, id: ContextId) -> None:
        self.id = id
        self.since = time.monotonic()
        self.last_used = self.since
        self.arguments: set[AutogradMessageId] = set()
        self.results: set[AutogradMessageId] = set()
        self.known_workers: weakref.WeakSet[Link] = weakref.WeakSet()
        """The links that calls of this context went over. The workers at their other ends hold a part of the
        context."""
        self.oldest_pass = 0
        """The number of the oldest unfinished pass of the owner, as far as calls in the context said it."""
        self.peers: set[int] = set()
        """The peers that made requests in the context and will say when it ends, also those whose request
        was being served when the context came to be. While any of them is linked, the lease does not end
        it."""
        self._lock = threading.Lock()
        # Weak keys: the gradient of a leaf that a function made for a single call is freed with the leaf.
        self._gradients = WeakTensorKeyDictionary()
        self._handed_out = WeakTensorKeyDictionary()
        """For leaves whose gradients the user's code was given: the version of the leaf then, and whether
        more was added to the gradient since."""

    def accumulate(
        self, leaf: torch.Tensor, gradient: torch.Tensor, unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Adds a gradient, `unless` it no longer counts. Returns whether it was added.

        Checked under the lock: either both happen before the gradients are cleared, or both after.
        """
        with self._lock:
            if unless():
                return False
            so_far = self._gradients.get(leaf)  # type: ignore[no-untyped-call]
            self._gradients[leaf] = gradient if so_far is None else added(so_far, gradient)
            if self._handed_out and leaf in self._handed_out:
                version, _ = self._handed_out[leaf]
                self._handed_out[leaf] = version, True
            return True

    def take_gradient(self, leaf: torch.Tensor) -> torch.Tensor | None:
        with self._lock:
            gradient: torch.Tensor | None = self._gradients.pop(leaf, None)  # type: ignore[no-untyped-call]
            return gradient

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        with self._lock:
            return dict(self._gradients)

    def hand_out(self) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients, for the user's code.

        Raises StepRefused for those that were handed out before, if since then the leaf was changed and more
        was added: code that steps with gradients without clearing them would step with all earlier ones, too.
        """
        with self._lock:
            found = dict(self._gradients)
            for leaf in found:
                version, has_grown = self._handed_out.get(leaf, (version_of(leaf), False))  # type: ignore[no-untyped-call]
                if has_grown and version_of(leaf) != version:
                    refused = StepRefused(
                        f"the gradient of a tensor of shape {tuple(leaf.shape)} was handed out before, and "
                        "the tensor was changed since; now it is the sum of that gradient and later ones. "
                        "Clear gradients when they were used: context.step(optimizer) does, or "
                        "context.zero_grad()"
                    )
                    refused.reason = "error"
                    raise refused
            for leaf in found:
                self._handed_out[leaf] = version_of(leaf), False
            return found

    def take_gradients(self, leaves: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of some leaves, which are cleared."""
        with self._lock:
            taken = {leaf: self._gradients[leaf] for leaf in leaves if leaf in self._gradients}
            self._clear(taken)
            return taken

    def clear_gradients(self, leaves: Iterable[torch.Tensor] | None = None) -> None:
        with self._lock:
            self._clear(list(self._gradients) if leaves is None else leaves)

    def _clear(self, leaves: Iterable[torch.Tensor]) -> None:
        for leaf in leaves:
            self._gradients.pop(leaf, None)  # type: ignore[no-untyped-call]
            self._handed_out.pop(leaf, None)  # type: ignore[no-untyped-call]

    def change_gradients(
        self, leaves: Iterable[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Replaces gradients by what a function makes of them. Not in place: they may share memory."""
        with self._lock:
            for leaf in leaves:
                if leaf in self._gradients:
                    self._gradients[leaf] = change(self._gradients[leaf])


class _Requests:
    """The requests that are being served in one context, which may not exist yet."""

    __slots__ = ("context", "count", "id", "requesters")

    def __init__(self, id: ContextId) -> None:
        self.id = id
        self.context: DistAutogradContext | None = None
        """Set once it exists."""
        self.count = 0
        self.requesters: set[int] = set()


class _InUse:
    """A block in which a request is served in contexts."""

    __slots__ = ("_begun", "_container", "_ids", "_requester")

    def __init__(
        self, container: DistAutogradContainer, ids: Sequence[ContextId | None], requester: int | None
    ) -> None:
        self._container = container
        self._ids = ids
        self._requester = requester

    # Ids are looked up as seldom as can be: every call comes here, and their hash is computed in Python.

    def __enter__(self) -> None:
        begun: list[_Requests] = []
        self._begun = begun
        container, requester = self._container, self._requester
        with container._lock:
            for id in self._ids:
                if id is None:
                    continue
                requests = container._requests.setdefault(id, _Requests(id))
                begun.append(requests)
                if not requests.count:
                    requests.context = container._contexts.get(id)
                requests.count += 1
                if requester is not None:
                    requests.requesters.add(requester)
                    if requests.context is not None:
                        requests.context.peers.add(requester)

    def __exit__(self, *_: object) -> None:
        container = self._container
        with container._lock:
            for requests in self._begun:
                requests.count -= 1
                if not requests.count:
                    del container._requests[requests.id]
                if requests.context is not None:
                    requests.context.last_used = time.monotonic()


class DistAutogradContainer:
    """All contexts of a peer, and the messages in them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._contexts: dict[ContextId, DistAutogradContext] = {}
        self._arguments: dict[AutogradMessageId, SentArguments] = {}
        self._results: dict[AutogradMessageId, SentResults] = {}
        self._segments: dict[AutogradMessageId, RemoteGraphSegment] = {}
        self.suspended: dict[AutogradMessageId, SuspendedBackward] = {}
        """Backwards that wait for gradients which are still to come."""
        self.handles: weakref.WeakValueDictionary[AutogradMessageId, HandleReference]
        self.handles = weakref.WeakValueDictionary()
        """Segment handles that other peers were told of. `PeerReleases` keeps them, as long as its link."""
        self._ended: dict[ContextId, None] = {}
        self._requests: dict[ContextId, _Requests] = {}
        """Those that are being served, by id: most contexts come to be during their first request."""
        self.counts = Tally()
        """How many contexts each owner has."""
        self.result_bytes = Tally()
        """How many bytes of results are kept in the contexts of each owner."""
        self.hooks = EngineHooks()
        """`DistEngine.attach` replaces them."""

    def get(self, id: ContextId) -> DistAutogradContext:
        """The context, new if need be. Raises NotFound if it has ended."""
        with self._lock:
            context = self._contexts.get(id)
            if context is None:
                if id in self._ended:
                    raise NotFound(f"context {id} has ended, or its lease ran out")
                context = self._contexts[id] = DistAutogradContext(id)
                self.counts.add(id.peer, 1)
                requests = self._requests.get(id)
                if requests is not None:
                    requests.context = context
                    context.peers.update(requests.requesters)
            context.last_used = time.monotonic()
            return context

    def find(self, id: ContextId) -> DistAutogradContext | None:
        with self._lock:
            context = self._contexts.get(id)
            if context is not None:
                context.last_used = time.monotonic()
            return context

    def oldest_pass(self, id: ContextId) -> int:
        """The number of the oldest unfinished pass of a context's owner; 0 if the context is not there."""
        context = self._contexts.get(id)
        return 0 if context is None else context.oldest_pass

    def learn_oldest_pass(self, id: ContextId, number: int) -> bool:
        """Notes the number of the oldest unfinished pass of a context's owner. Returns whether it has grown.

        A context that is not there yet holds nothing of older passes.
        """
        context = self._contexts.get(id)
        if context is None or number <= context.oldest_pass:
            return False
        context.oldest_pass = number
        return True

    def in_use(self, *ids: ContextId | None, requester: int | None) -> AbstractContextManager[None]:
        """A block in which a request is served in contexts, whether they exist or not. Until it ends, the
        lease does not end them. None: the request names no such context.

        `requester` is the peer that will say when they end; None if no peer will.
        """
        return _InUse(self, ids, requester)

    def with_key(self, id: ContextId) -> ContextId:
        """The id of a context with its key, for one that people name without. All contexts are looked
        through."""
        if id.key or id in self._contexts:
            return id
        named = (
            context.id
            for context in self.contexts()
            if (context.id.peer, context.id.number) == (id.peer, id.number)
        )
        return next(named, id)

    def contexts(self) -> list[DistAutogradContext]:
        with self._lock:
            return list(self._contexts.values())

    def keep_arguments(self, sent: SentArguments) -> None:
        with self._lock:
            self.get(sent.context).arguments.add(sent.id)
            self._arguments[sent.id] = sent

    def keep_results(self, sent: SentResults) -> None:
        with self._lock:
            self.get(sent.context).results.add(sent.id)
            self._results[sent.id] = sent
            self.result_bytes.add(sent.context.peer, sent.bytes)

    def keep_remote_segment(self, segment: RemoteGraphSegment) -> None:
        with self._lock:
            self._segments[segment.id] = segment

    def remote_segments(
        self, ids: Sequence[AutogradMessageId], of: ReceivedTensors
    ) -> list[RemoteGraphSegment]:
        """The remote segments with these ids, as far as this peer knows them from the same worker and
        context: gradients go to different places, and at different times, for others."""
        with self._lock:
            found = [self._segments[id] for id in ids if id in self._segments]
        return [one for one in found if (one.id.peer, one.context) == (of.source.peer, of.context)]

    def arguments(self, id: AutogradMessageId) -> SentArguments | None:
        with self._lock:
            return self._arguments.get(id)

    def leave_out(self, messages: Sequence[AutogradMessageId]) -> None:
        """Has nothing new depend on arguments that another peer has released. They are still kept."""
        for sent in filter(None, map(self.arguments, messages)):
            leave_out(sent)

    def results(self, id: AutogradMessageId) -> SentResults | None:
        with self._lock:
            return self._results.get(id)

    def results_of(self, context: DistAutogradContext) -> list[SentResults]:
        with self._lock:
            return [self._results[id] for id in context.results if id in self._results]

    def _pop(
        self, id: AutogradMessageId
    ) -> Sequence[SentArguments | SentResults | RemoteGraphSegment | None]:
        return self._arguments.pop(id, None), self._pop_results(id), self._segments.pop(id, None)

    def _pop_results(self, id: AutogradMessageId) -> SentResults | None:
        sent = self._results.pop(id, None)
        if sent is not None:
            self.result_bytes.add(sent.context.peer, -sent.bytes)
        return sent

    def release(self, messages: Sequence[AutogradMessageId]) -> bool:
        """Another peer has released messages: they are no longer kept. Returns whether there were any."""
        released: list[SentArguments | SentResults | RemoteGraphSegment] = []
        with self._lock:
            for id in messages:
                for kept in self._pop(id):
                    if kept is not None:
                        released.append(kept)
                        context = self._contexts.get(kept.context)
                        if context is not None:
                            context.arguments.discard(id)
                            context.results.discard(id)
        for kept in released:
            if isinstance(kept, SentArguments):
                leave_out(kept)
        for given_up in filter(None, map(self.suspended.get, messages)):
            given_up.give_up()
        for reference in filter(None, map(self.handles.get, messages)):
            handle = reference()
            if handle is not None:
                handle.is_known = True
        if messages:
            self.hooks.when_released(messages)
        # Dropping the last reference runs destructors of whole graphs: not under the lock.
        return bool(released)

    def release_sent_to(self, peer: int, context: ContextId | None = None) -> bool:
        """Releases all messages, or those of a context, that went to a peer. Returns whether any did."""
        with self._lock:
            every: list[SentArguments | SentResults] = [*self._arguments.values(), *self._results.values()]
            sent = [m.id for m in every if m.peer == peer and context in (None, m.context)]
            segments = self._segments.values()
            sent += [s.id for s in segments if s.id.peer == peer and context in (None, s.context)]
        del every
        return self.release(sent)

    def end(self, id: ContextId) -> DistAutogradContext | None:
        """Ends a context: drops it for good, and later uses raise NotFound."""
        with self._lock:
            if id.number:
                self._ended[id] = None
                if len(self._ended) > _REMEMBERED_ENDED:
                    del self._ended[next(iter(self._ended))]
        return self.drop(id)

    def drop(self, id: ContextId) -> DistAutogradContext | None:
        """Drops a context with all its messages. A later use makes a new one."""
        with self._lock:
            context = self._contexts.pop(id, None)
            messages = [] if context is None else [*context.arguments, *context.results]
            messages += [segment.id for segment in self._segments.values() if segment.context == id]
            released = [self._pop(message) for message in messages]
            if context is not None:
                self.counts.add(id.peer, -1)
        del released  # without the lock, as in `release`
        return context

    def drop_owner(self, owner: int, keeps: Callable[[int], bool]) -> list[DistAutogradContext]:
        """Drops all contexts of a client, except those that came through a peer for which `keeps` is true."""
        owned = [context for context in self.contexts() if context.id.peer == owner]
        dropped = [context for context in owned if not any(map(keeps, tuple(context.peers)))]
        for context in dropped:
            self.drop(context.id)
        self.hooks.when_owner_dropped(owner)
        return dropped

    def unused(self, seconds: float, is_linked: Callable[[int], bool]) -> list[ContextId]:
        """Contexts that were not used for so many seconds, where neither the owner nor any of `peers` has a
        link to this peer."""
        before = time.monotonic() - seconds
        return [
            context.id
            for context in self.contexts()
            if context.last_used < before
            and context.id not in self._requests
            and not any(map(is_linked, (context.id.peer, *tuple(context.peers))))
        ]
