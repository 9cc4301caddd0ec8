"""Answers questions: one implementation behind the Link and the unary methods."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from gradwire import __version__, wire
from gradwire._node import Node
from gradwire._scope import current_scope, entered
from gradwire.autograd import ContextId, applied_modes, message_ids, nbytes
from gradwire.errors import MalformedMessage, Unavailable
from gradwire.proto.v1 import autograd_pb2, describe_pb2, link_pb2
from gradwire.transport import Exchange, Handler, faults
from gradwire_server.calling import CallRunner
from gradwire_server.execution import Slots
from gradwire_server.registry import Registry

__all__ = ["Servicer"]

log = logging.getLogger("gradwire.server")


class Servicer:
    """What a worker's node does when it is asked."""

    def __init__(self, node: Node, registry: Registry, slots: Slots, runner: CallRunner) -> None:
        self._node = node
        self._registry = registry
        self._slots = slots
        self._runner = runner
        self.draining = False
        self._methods: dict[int, Handler] = {
            link_pb2.METHOD_FORWARD_WITH_AUTOGRAD: self._when_open(self._forward),
            link_pb2.METHOD_DESCRIBE: self._describe,
            link_pb2.METHOD_INSPECT: self._inspect,
        }
        self._started = time.monotonic()
        self._answering: set[Exchange] = set()

    @property
    def name(self) -> str:
        return self._node.identity.name

    def open(self) -> None:
        """From now on the node serves calls."""
        self._node.methods.update(self._methods)

    def close(self) -> None:
        """The node goes on without serving calls."""
        for method in self._methods:
            self._node.methods.pop(method, None)

    def abandon(self) -> None:
        """Cancels the calls that still run, over links that stay open."""
        error = Unavailable(f"{self.name} is shutting down, and the call took too long", worker=self.name)
        for exchange in list(self._answering):
            exchange.fail(faults.describe(error, self.name))
            exchange.cancel()

    def _answer(
        self,
        exchange: Exchange,
        work: Callable[[Exchange], None],
        around_wait: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._answering.add(exchange)
        try:
            self._node.answer(exchange, work, around_wait)
        finally:
            self._answering.discard(exchange)

    def _when_open(self, work: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        """Hands work to a thread of its own, unless the worker is shutting down."""

        def handle(exchange: Exchange) -> None:
            if self.draining and not _ends_what_was_begun(exchange):
                error = Unavailable(f"{self.name} is shutting down", worker=self.name)
                exchange.fail(faults.describe(error, self.name))
            else:
                client = 0 if exchange.link is None else exchange.link.peer.node
                around_wait = partial(self._slots.yielded, client)
                task = partial(self._answer, exchange, work, around_wait)
                self._slots.submit(task, client, here=exchange.may_run_here)

        return handle

    def _forward(self, exchange: Exchange) -> None:
        request = wire.parse(autograd_pb2.ForwardWithAutogradRequest, exchange.request.body)
        participant = self._node.participant
        if request.released:
            participant.store.release(message_ids(request.released))
        context = ContextId.parse(request.autograd.context) if request.HasField("autograd") else None
        scope = current_scope().in_context(context, request.modes.detect_anomaly)
        handles: list[int] = []
        is_sent = False
        try:
            with entered(scope), applied_modes(request.modes), participant.store.in_use(context):
                reply, attachments = self._runner.run(request, exchange, context, handles)
            is_sent = participant.reply(exchange, reply, attachments)
        finally:
            if handles and not is_sent:
                self._runner.release(handles)
        if handles:
            exchange.when_cancelled(lambda: self._runner.release(handles))

    def _describe(self, exchange: Exchange) -> None:
        wire.parse(describe_pb2.DescribeRequest, exchange.request.body)
        reply = describe_pb2.DescribeReply(
            name=self.name,
            node=self._node.identity.node,
            version=__version__,
            torch_version=torch.__version__,
            functions=self._registry.describe(),
            types=self._registry.describe_types(),
            devices=["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))],
        )
        exchange.reply(reply.SerializeToString())

    def _inspect(self, exchange: Exchange) -> None:
        wire.parse(describe_pb2.InspectRequest, exchange.request.body)
        clients = {link.peer.node: link for link in self._node.links}
        now = time.monotonic()
        reply = describe_pb2.InspectReply(
            name=self.name,
            uptime_seconds=now - self._started,
            calls=self._slots.unfinished,
            resident_bytes=_resident_bytes(),
        )
        for context in self._node.participant.store.contexts():
            owner = clients.get(context.id.node)
            gradients = context.gradients().values()
            kept = self._node.participant.store.results_of(context)
            reply.contexts.add(
                id=str(context.id),
                owner=owner.peer.name if owner is not None else "",
                age_seconds=now - context.since,
                results=len(kept),
                arguments=len(context.arguments),
                gradients=len(gradients),
                bytes=sum(result.bytes for result in kept) + sum(map(nbytes, gradients)),
            )
        for node, link in clients.items():
            traffic = link.traffic
            reply.clients.add(
                name=link.peer.name,
                node=f"{node:016x}",
                connected=link.connected,
                sent_bytes=traffic.sent,
                received_bytes=traffic.received,
                saved_bytes=traffic.saved,
            )
        exchange.reply(reply.SerializeToString())


def _ends_what_was_begun(exchange: Exchange) -> bool:
    """Whether a call ends a step that was prepared: refusing it would leave others with half a step."""
    try:
        request = wire.parse(autograd_pb2.ForwardWithAutogradRequest, exchange.request.body)
    except MalformedMessage:
        return False
    return request.HasField("target") and request.function in ("commit", "abort", "outcome")


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # not Linux
