"""A node's part in passes that cross processes: what is sent and received, with gradients recorded.

The counterparts of PyTorch's sendMessageWithAutograd (`send_call`, `send_results`) and
getMessageWithAutograd (`receive_call`, `receive_response`). `serving` holds the part that answers
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
from gradwire.autograd.aliases import share_history
from gradwire.autograd.borrowing import borrowed_grad
from gradwire.autograd.contexts import DistAutogradContainer, DistAutogradContext
from gradwire.autograd.feedback import ErrorFeedback
from gradwire.autograd.groups import Reach, group_of
from gradwire.autograd.holding import HeldRun, add_gate
from gradwire.autograd.hooks import WaitingHooks
from gradwire.autograd.nodes import add_recv, add_send
from gradwire.autograd.records import ReceivedTensors, Releases, SentArguments, SentResults
from gradwire.autograd.regions import Name, Reached, Regions
from gradwire.errors import GradwireError, MalformedMessage, WorkerLost
from gradwire.proto.v1 import autograd_pb2, link_pb2
from gradwire.runtime.scope import current_scope
from gradwire.system.timers import call_later
from gradwire.transport.base import Link, ResponseFuture, Sendable, ServerCall
from gradwire.wire.ids import AutogradMessageId, ContextId, message_ids, message_protos

if TYPE_CHECKING:
    from gradwire.autograd.graph_tasks import BackwardRun

__all__ = ["DistEngine", "not_kept_apart"]

_FLUSH_SECONDS = 1.0
"""Releases ride on other messages; those that find none are sent on their own after so long."""


Response = autograd_pb2.ForwardWithAutogradResponse | autograd_pb2.PropagateGradientsResponse


_numbers = itertools.count(1)
"""For the ids of all nodes of the process: what a worker keeps is known by one number to all of them."""


_NOTHING = nullcontext()


def not_kept_apart(leaves: Sequence[Node]) -> AbstractContextManager[object]:
    return _NOTHING


class DistEngine:
    """One node's autograd."""

    def __init__(self, node: int, find_link: Callable[[int], Link | None]) -> None:
        self.node = node
        self.ambient = ContextId(node, 0)
        """The context of what this node does outside of any other."""
        self.limits = wire.Limits()
        """On what comes without a link, as unary calls do."""
        self.container = DistAutogradContainer()
        self.feedback = ErrorFeedback()
        self._find_link = find_link
        self._lock = threading.Lock()
        self.live: set[AutogradMessageId] = set()
        """Arguments that came in and are part of some graph, and results that reach third nodes' messages.
        As long as there are none, nothing here reaches a message of another node."""
        self._regions = Regions(node)
        self.held: dict[AutogradMessageId, HeldRun] = {}
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

    def new_id(self) -> AutogradMessageId:
        return AutogradMessageId(self.node, next(_numbers))

    # -- passes

    def start_pass(self) -> AutogradMessageId:
        """A backward starts here."""
        with self._pass_lock:
            id = self.new_id()
            self._passes.add(id.number)
            self._newest_pass = id.number
            return id

    def end_pass(self, id: AutogradMessageId) -> None:
        """It is over, well or not: what still comes of it is refused from the next call on."""
        self.hooks.take(id)
        with self._pass_lock:
            self._passes.discard(id.number)
            self._oldest_passes[self.node] = min(self._passes, default=self._newest_pass + 1)

    def is_over(self, pass_id: AutogradMessageId) -> bool:
        return pass_id.number < self._oldest_passes.get(pass_id.peer, 0)

    # -- as a caller

    def send_call(
        self,
        request: autograd_pb2.ForwardWithAutogradRequest,
        tensors: Sequence[torch.Tensor],
        context: ContextId,
        link: Link,
        future: ResponseFuture,
    ) -> None:
        """Records what a call sends, whose answer settles `future`."""
        context.write(request.autograd.context)
        request.autograd.oldest_pass = self._oldest_passes.get(context.peer, 0)
        sent = None
        releases = self.releases_to(link)
        learned: Sequence[AutogradMessageId] = ()
        if torch.is_grad_enabled():
            # A node's own ambient context ends with the node, and its peers notice that by themselves.
            if context != self.ambient:
                self.container.get(context).known_workers.add(link)
            sent = self.send(request.autograd, tensors, context, link)
            learned = releases.take_learned()
        # Last, so that nothing which was taken can get lost before the undoing is arranged.
        released = releases.take()
        if released or learned or sent is not None:
            self.undo_if_failed(future, link, sent, released, learned)
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
    ) -> AutogradMessageId | None:
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        if not differentiable:
            return None
        sent = SentArguments(self.new_id(), context, differentiable, link.peer.id)
        sent.id.write(autograd.message)
        if self.live:
            reached = self._regions.reached_by(differentiable, link.peer.id)
            autograd.depends_on.extend(message_protos(reached))
        add_send(sent, differentiable)
        # Kept until the other end says that nothing there refers to it: it may keep state, so that later
        # results reach these arguments.
        self.container.keep_arguments(sent)
        return sent.id

    def undo_if_failed(
        self,
        future: ResponseFuture,
        link: Link,
        sent: AutogradMessageId | None,
        released: Sequence[AutogradMessageId],
        learned: Sequence[AutogradMessageId] = (),
    ) -> None:
        """For a request that fails: the other end may never have seen it.

        So it cannot say when to let go of the arguments. Should it have kept something of them before it
        failed, a later backward through that is refused. What the request released is released again, and
        what it said was learned is said again: both may be done twice.
        """
        # Weakly: a future keeps its callbacks, and would keep itself.
        settled = weakref.ref(future)
        releases = self.releases_to(link)

        def undo() -> None:
            future = settled()
            if future is not None and (future.cancelled() or future.exception() is not None):
                if sent is not None:
                    self.container.release([sent])
                for id in released:
                    releases.append(id)
                for id in learned:
                    releases.append_learned(id)

        future.when_settled(undo)

    def receive_response(
        self,
        response: autograd_pb2.ForwardWithAutogradResponse,
        decoder: wire.Decoder,
        link: Link,
        what: str,
        compression: autograd_pb2.Compression | None = None,
    ) -> None:
        """Makes the results of a call part of the graph here. Their gradients are compressed as it says."""
        try:
            if response.HasField("autograd"):
                self.receive(response.autograd, decoder, link, what, compression, are_arguments=False)
            else:
                decoder.keep_requires_grad()
        finally:
            # Only now: what the results reach is still referred to, the rest may go.
            if response.released:
                self.container.release(message_ids(response.released))

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
        own = [self.container.arguments(id) for id in depends_on if id.peer == self.node]
        received = ReceivedTensors(
            self,
            AutogradMessageId.parse(autograd.message),
            ContextId.parse(autograd.context),
            link=link,
            releases=None if link is None else self.releases_to(link),
            are_arguments=are_arguments,
            compression=compression,
            what=what,
            arity=sum(decoder.requires_grad),
            depends_on=[sent for sent in own if sent is not None],
            foreign=[id for id in depends_on if id.peer != self.node],
            builds_on=self.container.reaches(message_ids(autograd.builds_on)),
        )
        # Not across contexts or workers: their gradients go to different places, and at different times.
        reached: list[SentArguments | Reach] = [*received.depends_on, *received.builds_on]
        if (received.builds_on or autograd.may_be_built_on) and all(map(received.may_share, reached)):
            self._join(received, autograd.may_be_built_on)
        self._attach(received, decoder)

    def _join(self, received: ReceivedTensors, may_be_built_on: bool) -> None:
        """Results that may have parts of a graph in common with others."""
        group = received.group = group_of(received)
        group.add(received)
        for sent in received.depends_on:
            sent.group = group
        if may_be_built_on:
            self.container.keep_reach(Reach(received, group))
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
        owner = autograd.context.peer
        if autograd.oldest_pass > self._oldest_passes.get(owner, 0):
            self._oldest_passes[owner] = autograd.oldest_pass
            self.hooks.forget(owner, autograd.oldest_pass)
        if autograd.knows and link is not None:
            self.releases_to(link).confirm(message_ids(autograd.knows))
        if not autograd.HasField("message") or not torch.is_grad_enabled():
            decoder.keep_requires_grad()
            return
        self.receive(autograd, decoder, link, what, compression, are_arguments=True)

    def _attach(self, received: ReceivedTensors, decoder: wire.Decoder) -> None:
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
        own_call: AutogradMessageId | None,
        function: str,
        check_fresh: Callable[[], None] | None = None,
    ) -> autograd_pb2.AutogradMetadata | None:
        """Records what a response sends; None if nothing in it requires grad."""
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        if not differentiable or not torch.is_grad_enabled():
            return None
        server_call = current_scope().server_call
        link = None if server_call is None else server_call.link
        requester = context.peer if link is None else link.peer.id
        sent = SentResults(self.new_id(), context, differentiable, function, requester, check_fresh)
        autograd = autograd_pb2.AutogradMetadata()
        context.write(autograd.context)
        sent.id.write(autograd.message)
        own = own_call is not None and own_call in self.live
        if context.peer == self.node != requester:  # who calls itself has the graph of both ends
            self._await_own_results(sent, differentiable, autograd)
        elif len(self.live) > own or self.container.get(context).results:
            self._describe(sent, differentiable, own_call, link, autograd)
        elif own_call is not None and own:
            # There is no other, so the graph need not be walked.
            own_call.write(autograd.depends_on.add())
        self.container.keep_results(sent)
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
        self.container.keep_arguments(mailbox)

    def _describe(
        self,
        sent: SentResults,
        tensors: Sequence[torch.Tensor],
        own_call: AutogradMessageId | None,
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

    def collect(self, run: BackwardRun, into: ContextId, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds the gradient of a leaf of this process to a context."""
        context = self.container.get(into)
        if run.requester is not None:
            context.peers.add(run.requester)
        # What still runs of a backward that failed no longer counts once its caller has gone on.
        context.accumulate(leaf, gradient, unless=partial(self.is_over, run.pass_id))
        if leaf._post_accumulate_grad_hooks:
            self.hooks.add_leaf(run.pass_id, into, leaf)

    def link_to(self, received: ReceivedTensors) -> Link:
        """The way to where tensors came from."""
        link = received.link
        if link is None or link.ended is not None:
            link = self._find_link(received.source.peer) or link
        if link is None:
            raise WorkerLost(
                f"the gradients for {received.what} cannot be delivered: its caller has no link to this node"
            )
        return link

    def give_up(self, like: ReceivedTensors, held_run: AutogradMessageId) -> None:
        """Tells the node that results came from not to wait for more gradients of a run."""
        request = autograd_pb2.CleanupContextRequest(held_runs=message_protos([held_run]))
        try:
            self.link_to(like).send_request(
                link_pb2.METHOD_CLEANUP_CONTEXT, request.SerializeToString(), timeout=60.0
            )
        except GradwireError:
            pass  # it is gone, and the run with it

    # -- letting go

    def respond(self, server_call: ServerCall, response: Response, attachments: Sequence[Sendable]) -> bool:
        """Answers, and says along what the requester may let go of. Whether the requester gets the answer.

        If not, or if it cancels and so will not look into the answer, it does not learn what there is to
        release of its own, nor which results it could release here.
        """
        link = server_call.link
        releases = None if link is None else self.releases_to(link)
        released = [] if releases is None else releases.take()
        results = (
            [AutogradMessageId.parse(response.autograd.message)] if response.HasField("autograd") else []
        )

        def undo() -> None:
            self.container.release(results)
            if releases is not None:
                for id in released:
                    releases.append(id)

        is_sent = False
        try:
            if released:
                response.released.extend(message_protos(released))
            is_sent = server_call.respond(response.SerializeToString(), attachments)
        finally:
            if not is_sent:
                undo()
        if is_sent and link is not None and (released or results):
            server_call.when_cancelled(undo)
        return is_sent

    def releases_to(self, link: Link) -> Releases:
        """What the node at the other end of a link may let go of."""
        releases: Releases | None = link.autograd_state
        if releases is None:
            with self._lock:
                releases = link.autograd_state = link.autograd_state or self._new_releases(link)
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
        for kind, body in releases.take_discarded():
            self._release_discarded(kind, body, releases)
        released = releases.take()
        if not released:
            return
        request = autograd_pb2.CleanupContextRequest(messages=message_protos(released))
        future = ResponseFuture()
        self.undo_if_failed(future, link, None, released)
        try:
            link.send_request(
                link_pb2.METHOD_CLEANUP_CONTEXT,
                request.SerializeToString(),
                timeout=60.0,
                future=future,
            )
        except GradwireError:
            # Nothing was sent. It may be cut, and does not wait: then there is another time.
            for id in released:
                releases.append(id)

    def _release_discarded(self, kind: type[Response], body: bytes, releases: Releases) -> None:
        try:
            response = wire.parse(kind, body)
        except MalformedMessage:
            return
        self.container.release(message_ids(response.released))
        if response.HasField("autograd"):
            releases.append(AutogradMessageId.parse(response.autograd.message))
        for ref in wire.refs_in([response]):
            if ref.handle:
                releases.append(AutogradMessageId(ref.peer.id, ref.handle))

    def end_context(self, id: ContextId) -> bool:
        """Lets go of a context here and wherever this node took it. Whether there was anything."""
        context = self.container.end(id)
        if context is None:
            return False
        self._end_elsewhere(context, owner_is_gone=False)
        return True

    def end_context_unless_linked(self, id: ContextId, requester: int) -> bool:
        """Another node has lost the owner of a context: lets go of it, unless this node has not."""
        if not self.is_linked(id.peer):
            return self.end_context(id)
        return self.container.release_sent_to(requester, id)

    def _end_elsewhere(self, context: DistAutogradContext, *, owner_is_gone: bool) -> None:
        request = autograd_pb2.CleanupContextRequest(owner_is_gone=owner_is_gone)
        context.id.write(request.context)
        body = request.SerializeToString()
        for link in list(context.known_workers):
            try:
                link.send_request(link_pb2.METHOD_CLEANUP_CONTEXT, body, timeout=60.0)
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
        for context in self.container.drop_owner(node, keeps):
            self._end_elsewhere(context, owner_is_gone=True)
        self.container.release_sent_to(node)

    def is_linked(self, node: int) -> bool:
        return self._find_link(node) is not None

    def keep_lease(self, seconds: float) -> None:
        """From now on lets go of contexts that were not used for so long, unless they came over a link.

        A link has a lease of its own. Clients that call without one cannot be seen to go away.
        """
        call_later(max(seconds / 4, 0.01), partial(_sweep, weakref.ref(self), seconds))

    def sweep(self, seconds: float) -> bool:
        """One round of it. Whether there is to be another."""
        for id in self.container.unused(seconds, self.is_linked):
            if id.peer != self.node:
                self.end_context(id)
        return not self._closed

    def close(self) -> None:
        self._closed = True
        for held in list(self.held.values()):
            held.give_up("the node is shut down")


def _sweep(participant_ref: weakref.ref[DistEngine], seconds: float) -> None:
    engine = participant_ref()
    if engine is not None and engine.sweep(seconds):
        engine.keep_lease(seconds)
