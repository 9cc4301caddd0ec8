"""Running one call: from the request to the function or method, and from its result to the reply."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence

import torch

from gradwire import wire
from gradwire._node import Node
from gradwire._workers import handle_for
from gradwire.autograd import ContextId, MessageId
from gradwire.errors import InvalidDeviceMap, MalformedMessage, StaleParameters
from gradwire.proto.v1 import autograd_pb2, value_pb2
from gradwire.transport import Exchange
from gradwire_server.objects import Held, Objects, Recipe, method_of
from gradwire_server.registry import Registry, Served

__all__ = ["CallRunner"]


class CallRunner:
    """Runs calls of one worker's functions, classes and objects."""

    def __init__(self, node: Node, registry: Registry, objects: Objects, limits: wire.Limits) -> None:
        self._node = node
        self._registry = registry
        self._objects = objects
        self._limits = limits
        self._methods: dict[tuple[type, str], Served] = {}

    @property
    def _name(self) -> str:
        return self._node.identity.name

    def run(
        self,
        request: autograd_pb2.ForwardWithAutogradRequest,
        exchange: Exchange,
        context: ContextId | None,
    ) -> tuple[wire.Encoder, autograd_pb2.ForwardWithAutogradReply]:
        """Runs the function. On return nothing refers to the arguments but what the function kept."""
        target = self._objects.find(request.target) if request.HasField("target") else None
        served = (
            self._registry.find(request.function, self._name)
            if target is None
            else self._method(target, request.function)
        )
        owner = _asker(request, exchange)
        check_fresh = _freshness(target) if target is not None and torch.is_grad_enabled() else None
        result = self._evaluate(served, target, request, exchange)
        if request.HasField("keep") or self._registry.makes_objects(served):
            result = self._keep(result, served, request, exchange, owner)
        encoder = wire.Encoder(
            types=self._registry.types,
            attach_from=wire.ATTACH_FROM if exchange.link else None,
            ref_of=lambda value: self._ref_of(value, owner),
        )
        reply = autograd_pb2.ForwardWithAutogradReply(result=encoder.value(result, "result"))
        if context is not None:
            own = request.autograd.message if request.autograd.HasField("message") else None
            autograd = self._node.participant.send_results(
                encoder.tensors,
                context,
                None if own is None else MessageId.parse(own),
                request.function if target is None else f"{type(target.value).__name__}.{request.function}",
                check_fresh,
            )
            if autograd is not None:
                reply.autograd.CopyFrom(autograd)
        return encoder, reply

    def _evaluate(
        self,
        served: Served,
        target: Held | None,
        request: autograd_pb2.ForwardWithAutogradRequest,
        exchange: Exchange,
    ) -> object:
        args, kwargs = self.arguments(request, exchange)
        if target is not None:
            args.insert(0, target.value)
        served.bind(args, kwargs)
        result = served.value(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    def arguments(
        self, request: autograd_pb2.ForwardWithAutogradRequest, exchange: Exchange
    ) -> tuple[list[object], dict[str, object]]:
        """The arguments of a call, as part of the graph here."""
        decoder = wire.Decoder(
            request.tensors,
            exchange.request.attachments,
            limits=self._limits,
            types=self._registry.types,
            resolve_ref=self._resolve,
        )
        _put_on_devices(decoder, request.devices)
        self._node.participant.receive_call(
            request.autograd, decoder, exchange.link, f"the arguments of {request.function}"
        )
        args = [decoder.value(value, f"args[{index}]") for index, value in enumerate(request.args)]
        kwargs = {name: decoder.value(value, name) for name, value in request.kwargs.items()}
        return args, kwargs

    def _method(self, target: Held, name: str) -> Served:
        """A method as a function of the object. Found once for each class."""
        key = (type(target.value), name)
        served = self._methods.get(key)
        if served is None:
            served = self._methods[key] = method_of(target, name, self._name)
        return served

    # -- objects that stay

    def _keep(
        self,
        value: object,
        served: Served,
        request: autograd_pb2.ForwardWithAutogradRequest,
        exchange: Exchange,
        owner: int,
    ) -> object:
        # What made it is kept, too, if all of it is in the message: so a restart can make it again.
        is_whole = not exchange.request.attachments
        recipe = Recipe(served.name, request.SerializeToString()) if is_whole else None
        held = self._objects.keep(
            value,
            owner=owner,
            name=request.keep.name,
            allow_stale=request.keep.allow_stale,
            recipe=recipe,
        )
        return _Ref(self._objects.ref(held))

    def _ref_of(self, value: object, owner: int) -> value_pb2.RemoteRef | None:
        """The ref of an object that is kept, or that has to be because its class is exposed."""
        if isinstance(value, _Ref):
            return value.ref
        held = self._objects.of(value)
        if held is None and self._registry.is_instance_of_served(value):
            held = self._objects.keep(value, owner=owner)
        return None if held is None else self._objects.ref(held)

    def _resolve(self, ref: value_pb2.RemoteRef) -> object:
        """The object itself if it is here, else a handle to where it is."""
        if ref.node.id != self._node.identity.node:
            is_elsewhere = self._node.find_link(ref.node.id) is not None
            # A name that comes with another node's id may be ours from before a restart.
            if is_elsewhere or not ref.name:
                return handle_for(ref, self._node)
        return self._objects.find(ref).value


class _Ref:
    """A result that is sent as the ref to it."""

    def __init__(self, ref: value_pb2.RemoteRef) -> None:
        self.ref = ref


def _asker(request: autograd_pb2.ForwardWithAutogradRequest, exchange: Exchange) -> int:
    """Whose the objects are that a call makes."""
    if exchange.link is not None:
        return exchange.link.peer.node
    if request.keep.name or not request.HasField("autograd"):
        return 0
    return request.autograd.context.node


def _freshness(target: Held) -> Callable[[], None] | None:
    """A check that the parameters of a module are still those of now."""
    module = target.value
    if target.allow_stale or not isinstance(module, torch.nn.Module):
        return None
    versions = [(name, parameter, parameter._version) for name, parameter in module.named_parameters()]
    class_name = type(module).__name__

    def check() -> None:
        stale = [name for name, parameter, version in versions if parameter._version != version]
        if stale:
            shown = ", ".join(stale[:5]) + (f" and {len(stale) - 5} more" if len(stale) > 5 else "")
            error = StaleParameters(
                f"{class_name}: {shown} changed between the forward and this backward; run the forward "
                'again, or make the module with stale="allow" for asynchronous training'
            )
            error.parameters = tuple(stale)
            raise error

    return check


def _put_on_devices(decoder: wire.Decoder, devices: Sequence[str]) -> None:
    if len(devices) > len(decoder.tensors):
        raise MalformedMessage(f"{len(devices)} devices for {len(decoder.tensors)} tensors")
    for index, device in enumerate(devices):
        if device:
            try:
                decoder.tensors[index] = decoder.tensors[index].to(device)
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                raise InvalidDeviceMap(f"a tensor cannot be put on {device!r} here: {error}") from None
