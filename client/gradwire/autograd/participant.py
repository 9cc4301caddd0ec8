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
from functools import partial

import torch

from gradwire import wire
from gradwire._scope import cancel_with_caller, current_scope, time_left
from gradwire.autograd.aliases import share_history
from gradwire.autograd.contexts import ContextState, ContextStore
from gradwire.autograd.ids import ContextId, HandleId, MessageId, message_ids, message_protos
from gradwire.autograd.local import received_by
from gradwire.autograd.modes import anomaly_is_wanted
from gradwire.autograd.nodes import add_recv, add_send
from gradwire.autograd.passes import Propagation, Task
from gradwire.autograd.records import Gradients, Received, Releases, SentArguments, SentResults
from gradwire.errors import GradwireError, MalformedMessage, NotFound, WorkerLost
from gradwire.proto.v1 import autograd_pb2, link_pb2
from gradwire.transport.base import Exchange, Link, Pending
from gradwire.transport.base import Received as ReceivedMessage
from gradwire.transport.timers import call_later

__all__ = ["Participant", "decode_gradients", "encode_gradients"]

_FLUSH_SECONDS = 1.0
"""Releases ride on other messages; those that find none are sent on their own after so long."""


Reply = autograd_pb2.ForwardWithAutogradReply | autograd_pb2.PropagateGradientsReply


class Participant:
    """One node's autograd."""

    def __init__(self, node: int, find_link: Callable[[int], Link | None]) -> None:
        self.node = node
        self.store = ContextStore()
        self._find_link = find_link
        self._counter = itertools.count(1)
        self._lock = threading.Lock()
        self._releases: weakref.WeakKeyDictionary[Link, Releases] = weakref.WeakKeyDictionary()
        self.live: set[MessageId] = set()
        """Arguments that came in and are part of some graph, and results that reach third nodes' messages.
        As long as there are none, nothing here reaches a message of another node."""
        # Reentrant: the destructor of a task ends its pass, at any moment.
        self._pass_lock = threading.RLock()
        self._newest_pass = 0
        self._passes: set[int] = set()
        """The numbers of the backwards that this node has started and that go on."""
        self._oldest_passes: dict[int, int] = {}
        """For each node, the oldest of its backwards that goes on, as far as it is known here."""
        self._closed = False

    def new_id(self) -> MessageId:
        return MessageId(self.node, next(self._counter))

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
        request.autograd.context.CopyFrom(context.proto)
        request.autograd.oldest_pass = self._oldest_passes.get(context.node, 0)
        sent = None
        if torch.is_grad_enabled():
            # A node's own ambient context ends with the node, and its peers notice that by themselves.
            if context != ContextId(self.node, 0):
                self.store.get(context).involved.add(link)
            sent = self._send(request.autograd, tensors, context, link)
        released = self.releases_to(link).take()
        request.released.extend(message_protos(released))
        self._undo_if_failed(pending, link, sent, released)

    def _send(
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
        autograd.message.CopyFrom(sent.id.proto)
        autograd.depends_on.extend(message_protos(self._reached_by(differentiable, None, link.peer.node)))
        add_send(sent, differentiable)
        # Kept until the other end says that nothing there refers to it: it may keep state, so that later
        # results reach these arguments.
        self.store.keep_arguments(sent)
        return sent.id

    def _undo_if_failed(
        self, pending: Pending, link: Link, sent: MessageId | None, released: Sequence[MessageId]
    ) -> None:
        """For a request that fails: the other end may never have seen it.

        So it cannot say when to let go of the arguments. Should it have kept something of them before it
        failed, a later backward through that is refused. What the request released is released again.
        """
        if sent is None and not released:
            return
        # Weakly: a future keeps its callbacks, and would keep itself.
        settled = weakref.ref(pending)
        releases = self.releases_to(link)

        def undo() -> None:
            pending = settled()
            if pending is not None and (pending.cancelled() or pending.exception() is not None):
                if sent is not None:
                    self.store.release([sent])
                for id in released:
                    if not isinstance(id, HandleId):  # it may have been seen
                        releases.append(id)

        pending.when_settled(undo)

    def receive_reply(
        self,
        reply: autograd_pb2.ForwardWithAutogradReply,
        decoder: wire.Decoder,
        link: Link,
        what: str,
    ) -> None:
        """Makes the results of a call part of the graph here."""
        try:
            if reply.HasField("autograd"):
                self._receive(reply.autograd, decoder, link, what, are_arguments=False)
            else:
                decoder.keep_requires_grad()
        finally:
            # Only now: what the results reach is still referred to, the rest may go.
            self.store.release(message_ids(reply.released))

    def _receive(
        self,
        autograd: autograd_pb2.AutogradMetadata,
        decoder: wire.Decoder,
        link: Link | None,
        what: str,
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
            what=what,
            arity=sum(decoder.requires_grad),
            depends_on=[sent for sent in own if sent is not None],
            foreign=[id for id in depends_on if id.node != self.node],
        )
        self._attach(received, decoder)

    # -- as a callee

    def receive_call(
        self, autograd: autograd_pb2.AutogradMetadata, decoder: wire.Decoder, link: Link | None, what: str
    ) -> None:
        """Makes the arguments of a call part of the graph here."""
        owner = autograd.context.node
        if autograd.oldest_pass > self._oldest_passes.get(owner, 0):
            self._oldest_passes[owner] = autograd.oldest_pass
        if not autograd.HasField("message") or not torch.is_grad_enabled():
            decoder.keep_requires_grad()
            return
        self._receive(autograd, decoder, link, what, are_arguments=True)

    def _attach(self, received: Received, decoder: wire.Decoder) -> None:
        slots = [index for index, requires in enumerate(decoder.requires_grad) if requires]
        if not slots:
            return
        if received.are_arguments or received.foreign:
            received.is_live = True
            self.live.add(received.source)
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
        depends_on = message_protos(self._reached_by(differentiable, own_call, asker))
        self.store.keep_results(sent)
        return autograd_pb2.AutogradMetadata(
            context=context.proto, message=sent.id.proto, depends_on=depends_on
        )

    def _reached_by(
        self, tensors: Sequence[torch.Tensor], own_call: MessageId | None, peer: int
    ) -> list[MessageId]:
        """The messages of other nodes that tensors reach which are about to go to a peer."""
        if not self.live:
            return []
        if own_call is not None and self.live == {own_call}:
            return [own_call]  # there is no other, so the graph need not be walked
        reached: dict[MessageId, None] = {}
        for received in received_by(tensors):
            if received.are_arguments:
                reached[received.source] = None
            if received.source.node != peer:  # else the peer knows better
                reached.update(dict.fromkeys(received.foreign))
        # What this node sent is in its own graph, where the walk has gone on; but one who calls itself is
        # told what it sent.
        return [id for id in reached if id.node != self.node or peer == self.node]

    # -- backward

    def propagate(
        self, received: Received, gradients: Gradients, task: Task, expect: Callable[[Propagation], None]
    ) -> None:
        """Sends gradients to where the tensors came from.

        `expect` is told before they leave: mail from a third node may be back before this returns.
        """
        link = received.link
        if link is None or link.ended is not None:
            link = self._find_link(received.source.node) or link
        if link is None:
            raise WorkerLost(
                f"the gradients for {received.what} cannot be delivered: its caller has no link to this node"
            )
        run = task.run
        released = self.releases_to(link).take()
        request = autograd_pb2.PropagateGradientsRequest(
            context=received.context.proto,
            retain_graph=task.retain_graph or not received.is_spent,
            create_graph=task.create_graph,
            skip_leaves=not task.collect_leaves,
            detect_anomaly=anomaly_is_wanted(),
            released=message_protos(released),
        )
        getattr(request, "pass").CopyFrom(task.pass_id(self).proto)
        if run is not None and run.collect_into is not None:
            request.collect_into.CopyFrom(run.collect_into.proto)
        encoder = wire.Encoder()
        encode_gradients(request.gradients, received.source, gradients, encoder)
        sent = None
        if task.create_graph:
            request.autograd.context.CopyFrom(received.context.proto)
            sent = self._send(request.autograd, encoder.tensors, received.context, link)
        pending = Pending()
        lets_go = not request.retain_graph and not received.are_arguments
        # The flag tells the other end to let go after this, if it comes to that.
        self._undo_if_failed(pending, link, sent, [*released, received.source] if lets_go else released)
        what = f"{received.what} on {link.peer}"
        deliver = partial(self._deliver, task.id, received, link, what)
        try:
            table, attachments = encoder.finish()
            request.tensors.CopyFrom(table)
            cancel_with_caller(pending)
            expect(Propagation(pending, deliver, self.releases_to(link).append_unread, what))
            link.ask(
                link_pb2.METHOD_PROPAGATE_GRADIENTS,
                request.SerializeToString(),
                attachments,
                timeout=time_left(None),
                pending=pending,
            )
        except BaseException:
            pending.cancel()
            raise
        if lets_go:
            received.released()

    def _deliver(
        self, task: int, received: Received, link: Link, what: str, message: ReceivedMessage
    ) -> None:
        """Puts the contributions of a reply into the mailboxes."""
        reply = wire.parse(autograd_pb2.PropagateGradientsReply, message.body)
        decoder = wire.Decoder(reply.tensors, message.attachments)
        try:
            if reply.HasField("autograd"):
                self._receive(reply.autograd, decoder, link, f"the backward of {what}", are_arguments=False)
            # Not from the store: a reply to somebody else may have overtaken this one, and released them.
            awaited = {sent.id: sent for sent in received.depends_on}
            for contribution in reply.contributions:
                id = MessageId.parse(contribution.message)
                sent = awaited.get(id)
                if sent is None:
                    raise NotFound(
                        f"{link.peer} sent gradients for arguments that this node no longer keeps: they were "
                        "sent in a context that has ended, or in a call that failed; detach what is kept on "
                        "a worker between contexts"
                    )
                if not sent.put(task, decode_gradients(contribution, decoder, sent.like)):
                    raise MalformedMessage(f"{link.peer} sent gradients that nothing here awaits: {id}")
        finally:
            self.store.release(message_ids(reply.released))

    # -- letting go

    def undo_if_unread(self, reply: Reply, exchange: Exchange) -> None:
        """For a reply that was just sent: whoever cancels will not look into it.

        So it does not learn what there is to release of its own, nor which results it could release here.
        """
        link = exchange.link
        released = message_ids(reply.released)
        results = [MessageId.parse(reply.autograd.message)] if reply.HasField("autograd") else []
        if link is None or not (released or results):
            return
        releases = self.releases_to(link)

        def undo() -> None:
            self.store.release(results)
            for id in released:
                releases.append(id)

        exchange.when_cancelled(undo)

    def releases_to(self, link: Link) -> Releases:
        """What the node at the other end of a link may let go of."""
        with self._lock:
            releases = self._releases.get(link)
            if releases is not None:
                return releases
            releases = self._releases[link] = Releases()
        call_later(_FLUSH_SECONDS, partial(self._flush, weakref.ref(link)))
        return releases

    def _flush(self, link_ref: weakref.ref[Link]) -> None:
        link = link_ref()
        if link is None or link.ended is not None:
            return
        releases = self.releases_to(link)
        for kind, body in releases.take_unread():
            self._release_unread(kind, body, releases)
        released = releases.take()
        if released:
            request = autograd_pb2.CleanupContextRequest(messages=message_protos(released))
            pending = Pending()
            self._undo_if_failed(pending, link, None, released)
            try:
                link.ask(
                    link_pb2.METHOD_CLEANUP_CONTEXT,
                    request.SerializeToString(),
                    timeout=60.0,
                    pending=pending,
                )
            except GradwireError:
                return  # it ended just now, and everything with it
        call_later(_FLUSH_SECONDS, partial(self._flush, link_ref))

    def _release_unread(self, kind: type[Reply], body: bytes, releases: Releases) -> None:
        try:
            reply = wire.parse(kind, body)
        except MalformedMessage:
            return
        self.store.release(message_ids(reply.released))
        if reply.HasField("autograd"):
            releases.append(MessageId.parse(reply.autograd.message))

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
        request = autograd_pb2.CleanupContextRequest(
            context=context.id.proto, owner_is_gone=owner_is_gone
        ).SerializeToString()
        for link in list(context.involved):
            try:
                link.ask(link_pb2.METHOD_CLEANUP_CONTEXT, request, timeout=60.0)
            except GradwireError:
                continue  # gone, and everything with it

    def forget_client(self, node: int, *, is_gone: bool) -> None:
        """A client has no link to this node any more: lets go of what was held for it, or sent to it.

        Unless it `is_gone`, it keeps what comes by way of other nodes.
        """
        self._oldest_passes.pop(node, None)
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


def _sweep(participant_ref: weakref.ref[Participant], seconds: float) -> None:
    participant = participant_ref()
    if participant is not None and participant.sweep(seconds):
        participant.keep_lease(seconds)


def encode_gradients(
    message: autograd_pb2.Gradients, id: MessageId, gradients: Gradients, encoder: wire.Encoder
) -> None:
    message.message.CopyFrom(id.proto)
    for slot, gradient in enumerate(gradients):
        if gradient is not None:
            message.slots.append(slot)
            message.tensors.append(encoder.tensor(gradient, f"gradient {slot}"))


def decode_gradients(
    message: autograd_pb2.Gradients,
    decoder: wire.Decoder,
    like: Sequence[tuple[torch.Size, torch.device]],
) -> list[torch.Tensor | None]:
    """The gradients for the tensors of a message, on the devices of those tensors."""
    gradients: list[torch.Tensor | None] = [None] * len(like)
    if len(message.slots) != len(message.tensors):
        raise MalformedMessage(f"{len(message.slots)} slots but {len(message.tensors)} gradients")
    for slot, index in zip(message.slots, message.tensors, strict=True):
        if slot >= len(like) or index >= len(decoder.tensors):
            raise MalformedMessage(f"slot {slot} with tensor {index} does not exist: there are {len(like)}")
        gradient = decoder.tensors[index]
        shape, device = like[slot]
        if gradient.shape != shape:
            raise MalformedMessage(
                f"a gradient of shape {tuple(gradient.shape)} for a tensor of shape {tuple(shape)}"
            )
        gradients[slot] = gradient.to(device)
    return gradients
