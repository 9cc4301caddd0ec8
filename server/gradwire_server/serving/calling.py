"""Running one call: from the request to the function or method, and from its result to the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import CoroutineType

import numpy
import torch

from gradwire import wire
from gradwire.api.workers import handle_for
from gradwire.autograd import AutogradMessageId, ContextId, applied_modes, receive_call, send_results
from gradwire.errors import InvalidDeviceMap, MalformedMessage, StaleParameters
from gradwire.peers.local import LocalPeer
from gradwire.proto.v1 import autograd_pb2, value_pb2
from gradwire.runtime.scope import Scope, entered
from gradwire.torch_internals import storage_id, tree_map_only, version_of
from gradwire.transport import Buffer, Link, ServerCall
from gradwire_server.objects.access import Reading
from gradwire_server.objects.registry import ExposedFunction, Registry
from gradwire_server.objects.store import HeldObject, KeptResult, ObjectStore, Recipe, is_data
from gradwire_server.serving.limits import HoldLimits

__all__ = ["CallRunner"]


class CallRunner:
    """Runs calls of one worker's functions, classes and objects."""

    def __init__(
        self,
        peer: LocalPeer,
        registry: Registry,
        objects: ObjectStore,
        limits: wire.Limits,
        hold_limits: HoldLimits,
    ) -> None:
        self._peer = peer
        self._registry = registry
        self._objects = objects
        self._limits = limits
        self._hold_limits = hold_limits
        self._methods: dict[tuple[type, str], ExposedFunction] = {}

    @property
    def _name(self) -> str:
        return self._peer.identity.name

    def run(
        self,
        request: autograd_pb2.ForwardWithAutogradRequest,
        server_call: ServerCall,
        context: ContextId | None,
        handles: list[int],
    ) -> tuple[autograd_pb2.ForwardWithAutogradResponse, Sequence[wire.Attachment]]:
        """Runs the function. Adds the handles of the refs in its response to `handles`, also if it fails.

        On return nothing refers to the arguments but what the function kept, and nothing to the results: once
        they are sent, only who called decides how long they are kept.
        """
        target = self._objects.find(request.target) if request.HasField("target") else None
        served = (
            self._registry.find(request.function, self._name)
            if target is None
            else self._method(target, request.function)
        )
        owner = _asker(request, server_call)
        if not request.function.startswith("gradwire."):  # letting go must always be possible
            client = owner if context is None else context.peer
            self._hold_limits.check(self._peer.engine.container, self._objects, client)
        # An instance that is called by its name as a function is looked after like any other object.
        module = target or self._objects.of(served.value)
        # Before the function runs, which may change its arguments.
        recipe = self._recipe(served, request, server_call)
        with self._objects.in_use(module):
            result, check_fresh = self._evaluate(served, target, module, request, server_call)
        if request.HasField("keep") or served.makes_objects:
            result = self._keep(result, request, owner, recipe, handles)
        encoder = wire.Encoder(
            types=self._registry.types,
            attach_from=wire.ATTACH_FROM if server_call.link else None,
            inline_bytes=server_call.link.inline_bytes if server_call.link else 0,
            codec=wire.find_codec(request.compression.forward),
            ref_of=lambda value: self._ref_of(value, owner, handles),
        )
        response = autograd_pb2.ForwardWithAutogradResponse(result=encoder.value(result, "result"))
        table, attachments = encoder.finish()
        response.tensors.CopyFrom(table)
        if server_call.link is not None and encoder.saved:
            server_call.link.count_saved(encoder.saved)
        # Last: what is recorded is released by whoever gets the response.
        if context is not None:
            own = request.autograd.message if request.autograd.HasField("message") else None
            autograd = send_results(
                self._peer.engine,
                encoder.tensors,
                context,
                None if own is None else AutogradMessageId.parse(own),
                request.function if target is None else f"{type(target.value).__name__}.{request.function}",
                check_fresh,
            )
            if autograd is not None:
                response.autograd.CopyFrom(autograd)
        return response, attachments

    def _evaluate(
        self,
        served: ExposedFunction,
        target: HeldObject | None,
        module: HeldObject | None,
        request: autograd_pb2.ForwardWithAutogradRequest,
        server_call: ServerCall,
    ) -> tuple[object, Callable[[], None] | None]:
        """The result, and a check that its backward can still be run."""
        used = [] if module is None else [module]
        args, kwargs = self._arguments(request, server_call.request.attachments, server_call.link, used)
        reading = None
        if not request.function.startswith("gradwire."):  # those wait for their turn themselves
            reading = self._objects.access.reading(lock for held in used for lock in held.locks)
        if reading is None:
            return _call(served, target, args, kwargs), None
        with reading:
            check_fresh = _freshness(used, reading) if torch.is_grad_enabled() else None
            return _apart(_call(served, target, args, kwargs), used), check_fresh

    def _arguments(
        self,
        request: autograd_pb2.ForwardWithAutogradRequest,
        attachments: Sequence[Buffer],
        link: Link | None,
        used: list[HeldObject],
    ) -> tuple[list[object], dict[str, object]]:
        """The arguments of a call, as part of the graph here. Adds the objects among them to `used`."""
        decoder = wire.Decoder(
            request.tensors,
            attachments,
            limits=self._limits,
            types=self._registry.types,
            resolve_ref=partial(self._resolve, used),
        )
        if link is not None and decoder.saved:
            link.count_saved(decoder.saved)
        _put_on_devices(decoder, request.devices)
        receive_call(
            self._peer.engine,
            request.autograd,
            decoder,
            link,
            f"the arguments of {request.function}",
            request.compression if request.HasField("compression") else None,
        )
        args = [decoder.value(value, f"args[{index}]") for index, value in enumerate(request.args)]
        kwargs = {}
        if request.kwargs:  # to ask a map of protobuf for its items takes long
            kwargs = {name: decoder.value(value, name) for name, value in request.kwargs.items()}
        return args, kwargs

    def _method(self, target: HeldObject, name: str) -> ExposedFunction:
        """A method as a function of the object. Found once for each class."""
        key = (type(target.value), name)
        served = self._methods.get(key)
        if served is None:
            served = self._methods[key] = self._registry.method(target.value, name, self._name)
        return served

    # -- objects that stay

    def release(self, handles: Sequence[int]) -> None:
        """Lets go of refs that nobody will look at."""
        self._objects.release(handles)

    def _keep(
        self,
        value: object,
        request: autograd_pb2.ForwardWithAutogradRequest,
        owner: int,
        recipe: Recipe | None,
        handles: list[int],
    ) -> object:
        kept = self._objects.hand_out(
            value,
            owner=owner,
            name=request.keep.name,
            allow_stale=request.keep.allow_stale,
            recipe=recipe,
        )
        handles.append(kept.handle)
        return kept

    def _recipe(
        self,
        served: ExposedFunction,
        request: autograd_pb2.ForwardWithAutogradRequest,
        server_call: ServerCall,
    ) -> Recipe | None:
        """How to make an object with a name again after a restart; None if that will not be asked for."""
        if not request.keep.name or not self._objects.are_saved:
            return None
        kept = autograd_pb2.ForwardWithAutogradRequest()
        kept.CopyFrom(request)
        for unneeded in ("autograd", "released"):
            kept.ClearField(unneeded)
        for ref in _refs_in(kept):
            if ref.peer.id in self._objects.peers:
                if not ref.name:
                    return None  # what has no name is gone after a restart
                ref.peer.id = 0
        attachments = tuple(memory.tobytes() for memory in server_call.request.attachments)
        return Recipe(served.name, kept.SerializeToString(), attachments)

    def make_again(self, recipe: Recipe) -> object:
        """What a recipe makes."""
        request = wire.parse(autograd_pb2.ForwardWithAutogradRequest, recipe.arguments)
        for ref in _refs_in(request):
            ref.peer.id = ref.peer.id or self._peer.identity.id
        with ExitStack() as stack:
            stack.enter_context(entered(Scope(self._peer, detect_anomaly=request.modes.detect_anomaly)))
            if request.HasField("modes"):
                stack.enter_context(applied_modes(request.modes))
            target = self._objects.find(request.target) if request.HasField("target") else None
            served = (
                self._registry.find(request.function, self._name)
                if target is None
                else self._method(target, request.function)
            )
            attachments = [numpy.frombuffer(bytearray(one), numpy.uint8) for one in recipe.attachments]
            args, kwargs = self._arguments(request, attachments, None, [])
            return _call(served, target, args, kwargs)

    def _ref_of(self, value: object, owner: int, handles: list[int]) -> value_pb2.RemoteRef | None:
        """The ref of an object that is kept, or that has to be because its class is exposed."""
        if isinstance(value, KeptResult):
            return self._objects.ref(value, self._peer.identity.id)
        if is_data(value) or self._registry.is_record(value):
            return None  # it travels itself, even if somebody has a ref to it
        if self._registry.is_instance_of_served(value):
            kept: KeptResult | None = self._objects.hand_out(value, owner=owner)
        else:
            kept = self._objects.hand_out_again(value, owner=owner)
        if kept is None:
            return None
        handles.append(kept.handle)
        return self._objects.ref(kept, self._peer.identity.id)

    def _resolve(self, used: list[HeldObject], ref: value_pb2.RemoteRef) -> object:
        """The object itself if it is here, else a handle to where it is."""
        # Not by the name alone: another worker may share something else by the same name.
        if ref.peer.id not in self._objects.peers:
            return handle_for(ref, self._peer)
        used.append(self._objects.find(ref))
        return used[-1].value


def _call(
    served: ExposedFunction, target: HeldObject | None, args: list[object], kwargs: dict[str, object]
) -> object:
    if target is not None:
        args.insert(0, target.value)
    served.bind(args, kwargs)
    result = served.value(*args, **kwargs)
    return asyncio.run(result) if isinstance(result, CoroutineType) else result


def _refs_in(request: autograd_pb2.ForwardWithAutogradRequest) -> Iterator[value_pb2.RemoteRef]:
    """All refs in the target and the arguments of a call."""
    if request.HasField("target"):
        yield request.target
    yield from wire.refs_in([*request.args, *request.kwargs.values()])


def _asker(request: autograd_pb2.ForwardWithAutogradRequest, server_call: ServerCall) -> int:
    """Whose the objects are that a call makes."""
    if server_call.link is not None:
        return server_call.link.peer.id
    if request.keep.name or not request.HasField("autograd"):
        return 0
    return request.autograd.context.peer


def _freshness(used: Sequence[HeldObject], reading: Reading) -> Callable[[], None]:
    """A check that the parameters of modules are still those of now, unless they need not be, and that none
    was changed while it was computed with them."""
    strict = [held for held in used if not held.allow_stale and isinstance(held.value, torch.nn.Module)]
    versions = [
        (name, parameter, version_of(parameter))
        for held in strict
        for name, parameter in held.value.named_parameters()
    ]
    # A module that shares parameters and allows for stale ones puts their versions back.
    changes = [(lock, lock.unversioned_changes) for held in strict for lock in held.locks]
    class_names = ", ".join(dict.fromkeys(type(held.value).__name__ for held in used))

    def check() -> None:
        if reading.is_overtaken:
            raise StaleParameters(
                f"{class_names}: an optimizer step was made during the forward, which took too long to wait "
                "for; run it again"
            )
        stale = [name for name, parameter, version in versions if version_of(parameter) != version]
        if stale or any(lock.unversioned_changes != count for lock, count in changes):
            shown = ", ".join(stale[:5]) + (f" and {len(stale) - 5} more" if len(stale) > 5 else "")
            error = StaleParameters(
                f"{class_names}: {shown or 'parameters'} changed between the forward and this backward; run "
                'the forward again, or make the module with stale="allow" for asynchronous training'
            )
            error.parameters = tuple(stale)
            raise error

    return check


def _apart(result: object, used: Sequence[HeldObject]) -> object:
    """A result whose tensors share no memory with parameters that may change while it is sent.

    Elsewhere their version counters tell if they do. Where stale parameters are allowed, those stay the same.
    """
    lenient = [held.value for held in used if held.allow_stale and isinstance(held.value, torch.nn.Module)]
    if not lenient:
        return result
    shared = {storage_id(parameter) for module in lenient for parameter in module.parameters()}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        is_shared = tensor.layout is torch.strided and storage_id(tensor) in shared
        return tensor.clone() if is_shared else tensor

    return tree_map_only(torch.Tensor, copied, result)


def _put_on_devices(decoder: wire.Decoder, devices: Sequence[str]) -> None:
    if len(devices) > len(decoder.tensors):
        raise MalformedMessage(f"{len(devices)} devices for {len(decoder.tensors)} tensors")
    for index, device in enumerate(devices):
        if device:
            try:
                decoder.tensors[index] = decoder.tensors[index].to(device)
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                raise InvalidDeviceMap(f"a tensor cannot be put on {device!r} here: {error}") from None
