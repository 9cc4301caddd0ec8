"""Answers questions: one implementation behind the Link and the unary methods."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from google.protobuf.message import DecodeError, Message
from gradwire import __version__, wire
from gradwire._node import Node
from gradwire._scope import Scope, deadline, entered
from gradwire.errors import Cancelled, DeadlineExceeded, MalformedMessage, Unavailable
from gradwire.proto.v1 import autograd_pb2, describe_pb2, link_pb2
from gradwire.transport import Exchange, faults

from gradwire_server.execution import Slots
from gradwire_server.registry import Registry

__all__ = ["Servicer"]

log = logging.getLogger("gradwire.server")

M = TypeVar("M", bound=Message)


class Servicer:
    """What a worker's node does when it is asked."""

    def __init__(self, node: Node, registry: Registry, slots: Slots, limits: wire.Limits) -> None:
        self._node = node
        self._registry = registry
        self._slots = slots
        self._limits = limits
        self.draining = False
        node.methods[link_pb2.METHOD_FORWARD_WITH_AUTOGRAD] = self._when_open(self._forward)
        node.methods[link_pb2.METHOD_DESCRIBE] = self._describe

    @property
    def name(self) -> str:
        return self._node.identity.name

    def _when_open(self, work: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        """Hands work to a thread of its own, unless the worker is shutting down."""

        def handle(exchange: Exchange) -> None:
            if self.draining:
                error = Unavailable(f"{self.name} is shutting down", worker=self.name)
                exchange.fail(faults.describe(error, self.name))
            else:
                self._slots.submit(lambda: self._answer(work, exchange))

        return handle

    def _answer(self, work: Callable[[Exchange], None], exchange: Exchange) -> None:
        """Runs work in the scope of its question. Whatever it raises becomes the answer."""
        scope = Scope(self._node, exchange, exchange.deadline, self._slots.yielded)
        try:
            with entered(scope):
                self._check_wanted(exchange)
                work(exchange)
        except BaseException as error:  # a served function may raise SystemExit; the worker goes on
            exchange.fail(faults.describe(error, self.name))

    def _check_wanted(self, exchange: Exchange) -> None:
        if exchange.cancelled:
            raise Cancelled("the call was cancelled before it started", worker=self.name)
        left = deadline()
        if left is not None and left <= 0:
            raise DeadlineExceeded(f"the time ran out before {self.name} could start", worker=self.name)

    def _forward(self, exchange: Exchange) -> None:
        request = parse(autograd_pb2.ForwardWithAutogradRequest, exchange.request.body)
        served = self._registry.find(request.function, self.name)
        decoder = wire.Decoder(
            request.tensors,
            exchange.request.attachments,
            limits=self._limits,
            types=self._registry.types,
        )
        for tensor, requires_grad in zip(decoder.tensors, decoder.requires_grad, strict=False):
            if requires_grad:
                tensor.requires_grad_()
        args = [decoder.value(value, f"args[{index}]") for index, value in enumerate(request.args)]
        kwargs = {name: decoder.value(value, name) for name, value in request.kwargs.items()}
        served.bind(args, kwargs)
        result = served.value(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        encoder = wire.Encoder(types=self._registry.types)
        reply = autograd_pb2.ForwardWithAutogradReply(result=encoder.value(result, "result"))
        table, attachments = encoder.finish()
        reply.tensors.CopyFrom(table)
        exchange.reply(reply.SerializeToString(), attachments)

    def _describe(self, exchange: Exchange) -> None:
        parse(describe_pb2.DescribeRequest, exchange.request.body)
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


def parse(type_: type[M], body: bytes) -> M:
    """A request's message, or MalformedMessage."""
    try:
        return type_.FromString(body)
    except DecodeError as error:
        raise MalformedMessage(f"the body is no {type_.DESCRIPTOR.name}: {error}") from error
