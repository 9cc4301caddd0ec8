"""A node's part in passes that cross processes: what is sent and received, with gradients recorded.

The counterparts of PyTorch's sendMessageWithAutograd (`send_call`, `send_results`) and
getMessageWithAutograd (`receive_call`, `receive_reply`). `serving` holds the part that answers
PropagateGradients.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import Node

from gradwire import wire
from gradwire._scope import current_scope
from gradwire.autograd.aliases import share_history
from gradwire.autograd.borrowing import borrowed_grad
from gradwire.autograd.contexts import ContextState, ContextStore
from gradwire.autograd.feedback import ErrorFeedback
from gradwire.autograd.groups import Reach, group_of
from gradwire.autograd.holding import HeldRun, add_gate
from gradwire.autograd.hooks import WaitingHooks
from gradwire.autograd.ids import ContextId, MessageId, message_ids, message_protos
from gradwire.autograd.nodes import add_recv, add_send
from gradwire.autograd.records import Received, Releases, SentArguments, SentResults
from gradwire.autograd.regions import Name, Reached, Regions
from gradwire.errors import GradwireError, MalformedMessage, WorkerLost
from gradwire.proto.v1 import autograd_pb2, link_pb2
from gradwire.transport.base import Exchange, Link, Pending, Sendable
from gradwire.transport.timers import call_later

if TYPE_CHECKING:
    from gradwire.autograd.passes import Run

__all__ = ["Participant", "not_kept_apart"]

_FLUSH_SECONDS = 1.0
"""Releases ride on other messages; those that find none are sent on their own after so long."""


Reply = autograd_pb2.ForwardWithAutogradReply | autograd_pb2.PropagateGradientsReply


_numbers = itertools.count(1)
"""For the ids of all nodes of the process: what a worker keeps is known by one number to all of them."""


_NOTHING = nullcontext()


def not_kept_apart(leaves: Sequence[Node]) -> AbstractContextManager[object]:
    return _NOTHING


class Participant:
    """One node's autograd."""

    def __init__(self, node: int, find_link: Callable[[int], Link | None]) -> None:
        self.node = node
        self.ambient = ContextId(node, 0)
        """The context of what this node does outside of any other."""
        self.limits = wire.Limits()
        """On what comes without a link, as unary calls do."""
        self.store = ContextStore()
        self.feedback = ErrorFeedback()
        self._find_link = find_link
        self._lock = threading.Lock()
        self.live: set[MessageId] = set()
        """Arguments that came in and are part of some graph, and results that reach third nodes' messages.
        As long as there are none, nothing here reaches a message of another node."""
        self._regions = Regions(node)
        self.held: dict[MessageId, HeldRun] = {}
        """Runs that are held open for gradients which are still to come."""
        # Reentrant: the destructor of a task ends its pass, at any moment.
        self._pass_lock = threading.RLock()
        self._newest_pass = 0
        self._passes: set[int] = set()
        """The numbers of the backwards that this node has started and that go on."""
        self._oldest_passes: dict[int, int] = {}
        """For each node, the oldest of its backwards that goes on, as far as it is known here."""
        self.hooks = WaitingHooks()
        self._closed = False
        self.reading: Callable[[Sequence[Node]], AbstractContextManager[object]] = not_kept_apart
        """Entered around a run that reaches these leaves: others, who change them, are kept apart from it."""
        self.stepping: Callable[[Sequence[torch.Tensor]], AbstractContextManager[object]] = borrowed_grad
        """Entered around a step that finds its gradients in `.grad` of these leaves: others wait."""

    def new_id(self) -> MessageId:
        return MessageId(self.node, next(_numbers))

    # -- passes

    def start_pass(self) -> MessageId:
        """A backward starts here."""
        with self._pass_lock:
            id = self.new_id()
            self._passes.add(id.number)
            self._newest_pass = id.number
            return id

    def end_pass(self, id: MessageId) -> None:
        """It is over, well or not: what still comes of it is refused from the next call on."""
        self.hooks.take(id)
        with self._pass_lock:
            self._passes.discard(id.number)
            self._oldest_passes[self.node] = min(self._passes, default=self._newest_pass + 1)

    def is_over(self, pass_id: MessageId) -> bool:
        return pass_id.number < self._oldest_passes.get(pass_id.node, 0)

    # -- as a caller

    def send_call(
        self,
        request: autograd_pb2.ForwardWithAutogradRequest,
        tensors: Sequence[torch.Tensor],
        context: ContextId,
        link: Link,
        pending: Pending,
    ) -> None:
        """Records what a call sends, whose answer settles `pending`."""
        context.write(request.autograd.context)
        request.autograd.oldest_pass = self._oldest_passes.get(context.node, 0)
        sent = None
        releases = self.releases_to(link)
        learned: Sequence[MessageId] = ()
        if torch.is_grad_enabled():
            # A node's own ambient context ends with the node, and its peers notice that by themselves.
            if context != self.ambient:
                self.store.get(context).involved.add(link)
            sent = self.send(request.autograd, tensors, context, link)
            learned = releases.take_learned()
        # Last, so that nothing which was taken can get lost before the undoing is arranged.
        released = releases.take()
        if released or learned or sent is not None:
            self.undo_if_failed(pending, link, sent, released, learned)
        if learned:
            request.autograd.knows.extend(message_protos(learned))
        if released:
            request.released.extend(message_protos(released))

    def send(
        self,
        autograd: autograd_pb2.AutogradMetadata,
        tensors: Sequence[torch.Tensor],
        context: ContextId,
        link: Link,
    ) -> MessageId | None:
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        if not differentiable:
            return None
        sent = SentArguments(self.new_id(), context, differentiable, link.peer.node)
        sent.id.write(autograd.message)
        if self.live:
            reached = self._regions.reached_by(differentiable, link.peer.node)
            autograd.depends_on.extend(message_protos(reached))
        add_send(sent, differentiable)
        # Kept until the other end says that nothing there refers to it: it may keep state, so that later
        # results reach these arguments.
        self.store.keep_arguments(sent)
        return sent.id

    def undo_if_failed(
        self,
        pending: Pending,
        link: Link,
        sent: MessageId | None,
        released: Sequence[MessageId],
        learned: Sequence[MessageId] = (),
    ) -> None:
        """For a request that fails: the other end may never have seen it.

        So it cannot say when to let go of the arguments. Should it have kept something of them before it
        failed, a later backward through that is refused. What the request released is released again, and
        what it said was learned is said again: both may be done twice.
        """
        # Weakly: a future keeps its callbacks, and would keep itself.
        settled = weakref.ref(pending)
        releases = self.releases_to(link)

        def undo() -> None:
            pending = settled()
            if pending is not None and (pending.cancelled() or pending.exception() is not None):
                if sent is not None:
                    self.store.release([sent])
                for id in released:
                    releases.append(id)
                for id in learned:
                    releases.append_learned(id)

        pending.when_settled(undo)

    def receive_reply(
        self,
        reply: autograd_pb2.ForwardWithAutogradReply,
        decoder: wire.Decoder,
        link: Link,
        what: str,
        compression: autograd_pb2.Compression | None = None,
    ) -> None:
        """Makes the results of a call part of the graph here. Their gradients are compressed as it says."""
        try:
            if reply.HasField("autograd"):
                self.receive(reply.autograd, decoder, link, what, compression, are_arguments=False)
            else:
                decoder.keep_requires_grad()
        finally:
            # Only now: what the results reach is still referred to, the rest may go.
            if reply.released:
                self.store.release(message_ids(reply.released))

    def receive(
        self,
        autograd: autograd_pb2.AutogradMetadata,
        decoder: wire.Decoder,
        link: Link | None,
        what: str,
        compression: autograd_pb2.Compression | None,
        *,
        are_arguments: bool,
    ) -> None:
        depends_on = message_ids(autograd.depends_on)
        own = [self.store.arguments(id) for id in depends_on if id.node == self.node]
        received = Received(
            self,
            MessageId.parse(autograd.message),
            ContextId.parse(autograd.context),
            link=link,
            releases=None if link is None else self.releases_to(link),
            are_arguments=are_arguments,
            compression=compression,
            what=what,
            arity=sum(decoder.requires_grad),
            depends_on=[sent for sent in own if sent is not None],
            foreign=[id for id in depends_on if id.node != self.node],
            builds_on=self.store.reaches(message_ids(autograd.builds_on)),
        )
        # Not across contexts or workers: their gradients go to different places, and at different times.
        reached: list[SentArguments | Reach] = [*received.depends_on, *received.builds_on]
        if (received.builds_on or autograd.may_be_built_on) and all(map(received.may_share, reached)):
            self._join(received, autograd.may_be_built_on)
        self._attach(received, decoder)

    def _join(self, received: Received, may_be_built_on: bool) -> None:
        """Results that may have parts of a graph in common with others."""
        group = received.group = group_of(received)
        group.add(received)
        for sent in received.depends_on:
            sent.group = group
        if may_be_built_on:
            self.store.keep_reach(Reach(received, group))
            if received.link is not None:
                self.releases_to(received.link).append_learned(received.source)

    # -- as a callee

    def receive_call(
        self,
        autograd: autograd_pb2.AutogradMetadata,
        decoder: wire.Decoder,
        link: Link | None,
        what: str,
        compression: autograd_pb2.Compression | None = None,
    ) -> None:
        """Makes the arguments of a call part of the graph here. Their gradients are compressed as it says."""
        owner = autograd.context.node
        if autograd.oldest_pass > self._oldest_passes.get(owner, 0):
            self._oldest_passes[owner] = autograd.oldest_pass
            self.hooks.forget(owner, autograd.oldest_pass)
        if autograd.knows and link is not None:
            self.releases_to(link).confirm(message_ids(autograd.knows))
        if not autograd.HasField("message") or not torch.is_grad_enabled():
            decoder.keep_requires_grad()
            return
        self.receive(autograd, decoder, link, what, compression, are_arguments=True)

    def _attach(self, received: Received, decoder: wire.Decoder) -> None:
        slots = [index for index, requires in enumerate(decoder.requires_grad) if requires]
        if not slots:
            return
        if received.are_arguments or received.foreign:
            received.is_live = True
            self.live.add(received.source)
        if decoder.is_shared:
            share_history(decoder.tensors, slots)
        # The call was made with gradients on, even if its result is fetched with gradients off.
        with torch.enable_grad():
            attached = add_recv(received, [decoder.tensors[index] for index in slots])
        for index, tensor in zip(slots, attached, strict=True):
            decoder.tensors[index] = tensor

    def send_results(
        self,
        tensors: Sequence[torch.Tensor],
        context: ContextId,
        own_call: MessageId | None,
        function: str,
        check_fresh: Callable[[], None] | None = None,
    ) -> autograd_pb2.AutogradMetadata | None:
        """Records what a reply sends; None if nothing in it requires grad."""
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        if not differentiable or not torch.is_grad_enabled():
            return None
        exchange = current_scope().exchange
        link = None if exchange is None else exchange.link
        asker = context.node if link is None else link.peer.node
        sent = SentResults(self.new_id(), context, differentiable, function, asker, check_fresh)
        autograd = autograd_pb2.AutogradMetadata()
        context.write(autograd.context)
        sent.id.write(autograd.message)
        own = own_call is not None and own_call in self.live
        if context.node == self.node != asker:  # who calls itself has the graph of both ends
            self._await_own_results(sent, differentiable, autograd)
        elif len(self.live) > own or self.store.get(context).results:
            self._describe(sent, differentiable, own_call, link, autograd)
        elif own_call is not None and own:
            # There is no other, so the graph need not be walked.
            own_call.write(autograd.depends_on.add())
        self.store.keep_results(sent)
        return autograd

    def _await_own_results(
        self, sent: SentResults, tensors: Sequence[torch.Tensor], autograd: autograd_pb2.AutogradMetadata
    ) -> None:
        """For results of a call that came back here, within a context of this very process.

        They are part of the graph of what this process will get as the answer to its own call. So they are
        recorded like arguments that it sends, and are themselves among the messages that the answer reaches:
        a backward here then goes through them in one graph task, and torch.autograd.grad sees their leaves.
        """
        mailbox = SentArguments(sent.id, sent.context, tensors, sent.peer)
        autograd.depends_on.extend(message_protos([sent.id, *self._regions.reached_by(tensors, sent.peer)]))
        add_send(mailbox, tensors)
        self.store.keep_arguments(mailbox)

    def _describe(
        self,
        sent: SentResults,
        tensors: Sequence[torch.Tensor],
        own_call: MessageId | None,
        link: Link | None,
        autograd: autograd_pb2.AutogradMetadata,
    ) -> None:
        """Says what results reach, where there is more than their own call."""
        if link is None:
            reached = Reached(self._regions.reached_by(tensors, sent.peer))
        else:
            name = Name(sent.id, sent.context, sent.peer)
            reached = self._regions.name(tensors, name, own_call)
            if name.is_usable:
                self.releases_to(link).offer(name)
                add_gate(sent, tensors)
                autograd.may_be_built_on = True
        autograd.depends_on.extend(message_protos(reached.messages))
        autograd.builds_on.extend(message_protos(reached.builds_on))

    # -- backward

    def collect(self, run: Run, into: ContextId, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds the gradient of a leaf of this process to a context."""
        context = self.store.get(into)
        if run.asker is not None:
            context.peers.add(run.asker)
        # What still runs of a backward that failed no longer counts once its caller has gone on.
        context.accumulate(leaf, gradient, unless=partial(self.is_over, run.pass_id))
        if leaf._post_accumulate_grad_hooks:
            self.hooks.add_leaf(run.pass_id, into, leaf)

    def link_to(self, received: Received) -> Link:
        """The way to where tensors came from."""
        link = received.link
        if link is None or link.ended is not None:
            link = self._find_link(received.source.node) or link
        if link is None:
            raise WorkerLost(
                f"the gradients for {received.what} cannot be delivered: its caller has no link to this node"
            )
        return link

    def give_up(self, like: Received, held_run: MessageId) -> None:
        """Tells the node that results came from not to wait for more gradients of a run."""
        request = autograd_pb2.CleanupContextRequest(held_runs=message_protos([held_run]))
        try:
            self.link_to(like).ask(link_pb2.METHOD_CLEANUP_CONTEXT, request.SerializeToString(), timeout=60.0)
        except GradwireError:
            pass  # it is gone, and the run with it

    # -- letting go

    def reply(self, exchange: Exchange, reply: Reply, attachments: Sequence[Sendable]) -> bool:
        """Answers, and says along what the asker may let go of. Whether the asker gets the answer.

        If not, or if it cancels and so will not look into the answer, it does not learn what there is to
        release of its own, nor which results it could release here.
        """
        link = exchange.link
        releases = None if link is None else self.releases_to(link)
        released = [] if releases is None else releases.take()
        results = [MessageId.parse(reply.autograd.message)] if reply.HasField("autograd") else []

        def undo() -> None:
            self.store.release(results)
            if releases is not None:
                for id in released:
                    releases.append(id)

        is_sent = False
        try:
            if released:
                reply.released.extend(message_protos(released))
            is_sent = exchange.reply(reply.SerializeToString(), attachments)
        finally:
            if not is_sent:
                undo()
        if is_sent and link is not None and (released or results):
            exchange.when_cancelled(undo)
        return is_sent

    def releases_to(self, link: Link) -> Releases:
        """What the node at the other end of a link may let go of."""
        releases: Releases | None = link.annex
        if releases is None:
            with self._lock:
                releases = link.annex = link.annex or self._new_releases(link)
        return releases

    def _new_releases(self, link: Link) -> Releases:
        call_later(_FLUSH_SECONDS, partial(self._flush, weakref.ref(link)))
        return Releases()

    def _flush(self, link_ref: weakref.ref[Link]) -> None:
        link = link_ref()
        if link is None or link.ended is not None:
            return
        try:
            self._flush_now(link, self.releases_to(link))
        finally:
            call_later(_FLUSH_SECONDS, partial(self._flush, link_ref))

    def _flush_now(self, link: Link, releases: Releases) -> None:
        for kind, body in releases.take_unread():
            self._release_unread(kind, body, releases)
        released = releases.take()
        if not released:
            return
        request = autograd_pb2.CleanupContextRequest(messages=message_protos(released))
        pending = Pending()
        self.undo_if_failed(pending, link, None, released)
        try:
            link.ask(
                link_pb2.METHOD_CLEANUP_CONTEXT,
                request.SerializeToString(),
                timeout=60.0,
                pending=pending,
            )
        except GradwireError:
            # Nothing was sent. It may be cut, and does not wait: then there is another time.
            for id in released:
                releases.append(id)

    def _release_unread(self, kind: type[Reply], body: bytes, releases: Releases) -> None:
        try:
            reply = wire.parse(kind, body)
        except MalformedMessage:
            return
        self.store.release(message_ids(reply.released))
        if reply.HasField("autograd"):
            releases.append(MessageId.parse(reply.autograd.message))
        for ref in wire.refs_in([reply]):
            if ref.handle:
                releases.append(MessageId(ref.node.id, ref.handle))

    def end_context(self, id: ContextId) -> bool:
        """Lets go of a context here and wherever this node took it. Whether there was anything."""
        context = self.store.end(id)
        if context is None:
            return False
        self._end_elsewhere(context, owner_is_gone=False)
        return True

    def end_context_unless_linked(self, id: ContextId, asker: int) -> bool:
        """Another node has lost the owner of a context: lets go of it, unless this node has not."""
        if not self.is_linked(id.node):
            return self.end_context(id)
        return self.store.release_sent_to(asker, id)

    def _end_elsewhere(self, context: ContextState, *, owner_is_gone: bool) -> None:
        request = autograd_pb2.CleanupContextRequest(owner_is_gone=owner_is_gone)
        context.id.write(request.context)
        body = request.SerializeToString()
        for link in list(context.involved):
            try:
                link.ask(link_pb2.METHOD_CLEANUP_CONTEXT, body, timeout=60.0)
            except GradwireError:
                continue  # gone, and everything with it

    def forget_client(self, node: int, *, is_gone: bool) -> None:
        """A client has no link to this node any more: lets go of what was held for it, or sent to it.

        Unless it `is_gone`, it keeps what comes by way of other nodes.
        """
        self._oldest_passes.pop(node, None)
        self.hooks.forget(node)
        self.feedback.forget(node)
        keeps = (lambda _: False) if is_gone else self.is_linked
        for context in self.store.drop_owner(node, keeps):
            self._end_elsewhere(context, owner_is_gone=True)
        self.store.release_sent_to(node)

    def is_linked(self, node: int) -> bool:
        return self._find_link(node) is not None

    def keep_lease(self, seconds: float) -> None:
        """From now on lets go of contexts that were not used for so long, unless they came over a link.

        A link has a lease of its own. Clients that call without one cannot be seen to go away.
        """
        call_later(max(seconds / 4, 0.01), partial(_sweep, weakref.ref(self), seconds))

    def sweep(self, seconds: float) -> bool:
        """One round of it. Whether there is to be another."""
        for id in self.store.unused(seconds, self.is_linked):
            if id.node != self.node:
                self.end_context(id)
        return not self._closed

    def close(self) -> None:
        self._closed = True
        for held in list(self.held.values()):
            held.give_up("the node is shut down")


def _sweep(participant_ref: weakref.ref[Participant], seconds: float) -> None:
    participant = participant_ref()
    if participant is not None and participant.sweep(seconds):
        participant.keep_lease(seconds)
