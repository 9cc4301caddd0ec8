"""Executes one call: from the request to the function or method, and from its result to the response."""

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
from gradwire.autograd import Response, applied_modes, receive_call, send_results
from gradwire.errors import InvalidDeviceMap, MalformedMessage, NotFound
from gradwire.peers.local import LocalPeer
from gradwire.proto.v1 import autograd_pb2, value_pb2
from gradwire.runtime.scope import Scope, entered
from gradwire.transport import Buffer, Link, ServerCall
from gradwire_server.objects.optimizers import WorkerOptimizer
from gradwire_server.objects.registry import ExposedFunction, Registry
from gradwire_server.objects.store import ObjectOptions, ObjectStore
from gradwire_server.objects.stored import IssuedRef, Recipe, StoredObject, is_data
from gradwire_server.serving.call_requests import CallRequest, CallResult
from gradwire_server.serving.limits import HoldLimits
from gradwire_server.serving.staleness import staleness_check, unshared_result

__all__ = ["CallExecutor"]

_INTERNAL_PREFIX = "gradwire."
"""Begins the names of functions that are part of gradwire itself."""


class CallExecutor:
    """Executes calls of one worker's functions, classes and objects."""

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

    def execute(
        self,
        call: CallRequest,
        server_call: ServerCall,
        release_numbers: list[int],
    ) -> Response:
        """Executes a call. Adds the release numbers of the refs in its response to `release_numbers`, also
        if the call fails.

        On return nothing refers to the arguments but what the function itself kept, and nothing refers to the
        results: once they are sent, the caller alone decides how long they stay.
        """
        request = call.message
        context = None if call.metadata is None else call.metadata.context
        target, function = self._find_function(request)
        is_internal = request.function.startswith(_INTERNAL_PREFIX)
        owner = _owner_of_new_objects(request, server_call)
        if not is_internal:  # internal functions are not limited: deleting objects must always be possible
            client = owner if context is None else context.peer
            self._hold_limits.check(self._peer.engine.container, self._objects, client)
        # A call by an instance's name runs on that instance, as a method call does.
        called_object = target or self._objects.find(function.value)
        # Serialized before the function runs, because the function may change its arguments.
        recipe = self._recipe(function, request, server_call)
        with self._objects.in_use(called_object):
            result, check_staleness = self._compute(
                function, target, called_object, call, server_call, is_internal=is_internal
            )
        if request.HasField("keep") or function.makes_objects:
            options = ObjectOptions(request.keep.name, allow_stale=request.keep.allow_stale, recipe=recipe)
            issued = self._objects.issue_ref(result, owner, options)
            release_numbers.append(issued.release_number)
            result = issued
        link = server_call.link
        sent = CallResult(call, result, lambda: self._encoder(request, link, owner, release_numbers))
        if link is not None:
            link.count_saved(sent.saved)
        # The results are recorded last, when nothing can fail any more: only the receiver of the response
        # releases the record.
        metadata = None
        if call.metadata is not None:
            metadata = send_results(
                self._peer.engine,
                sent.tensors,
                call.metadata.context,
                call.metadata.message,
                request.function if target is None else f"{type(target.value).__name__}.{request.function}",
                check_staleness,
            )
        return sent.response(metadata)

    def _encoder(
        self,
        request: autograd_pb2.ForwardWithAutogradRequest,
        link: Link | None,
        owner: int,
        release_numbers: list[int],
    ) -> wire.Encoder:
        """For a result that is sent in full."""
        return wire.Encoder(
            types=self._registry.types,
            attach_from=None if link is None else wire.ATTACH_FROM,
            inline_bytes=0 if link is None else link.inline_bytes,
            codec=wire.find_codec(request.compression.forward),
            ref_of=lambda value: self._ref_of(value, owner, release_numbers),
        )

    def runs_on_optimizer(self, request: autograd_pb2.ForwardWithAutogradRequest) -> bool:
        """Whether a call is one of a trainer's optimizer here. Objects of the user's may have methods of the
        same names."""
        if not request.HasField("target"):
            return False
        try:
            return isinstance(self._objects.resolve(request.target).value, WorkerOptimizer)
        except NotFound:
            return False

    def _find_function(
        self, request: autograd_pb2.ForwardWithAutogradRequest
    ) -> tuple[StoredObject | None, ExposedFunction]:
        """The object whose method is called, if it is a method, and the function to call."""
        if not request.HasField("target"):
            return None, self._registry.function(request.function, self._peer.identity.name)
        target = self._objects.resolve(request.target)
        key = (type(target.value), request.function)
        method = self._methods.get(key)
        if method is None:
            method = self._registry.method(target.value, request.function, self._peer.identity.name)
            self._methods[key] = method
        return target, method

    def _compute(
        self,
        function: ExposedFunction,
        target: StoredObject | None,
        called_object: StoredObject | None,
        call: CallRequest,
        server_call: ServerCall,
        *,
        is_internal: bool,
    ) -> tuple[object, Callable[[], None] | None]:
        """The result, and a check that its backward can still be run."""
        used = [] if called_object is None else [called_object]
        args, kwargs = self._arguments(call, server_call.request.attachments, server_call.link, used)
        # Internal functions reserve the parameters themselves.
        guard = None if is_internal else self._objects.parameters.read_by_call(used)
        if guard is None:
            return _call(function, target, args, kwargs), None
        with guard:
            check = staleness_check(used, guard) if torch.is_grad_enabled() else None
            return unshared_result(_call(function, target, args, kwargs), used), check

    def _arguments(
        self,
        call: CallRequest,
        attachments: Sequence[Buffer],
        link: Link | None,
        used: list[StoredObject],
    ) -> tuple[list[object], dict[str, object]]:
        """The arguments of a call, as part of the graph here. Adds the stored objects among them to
        `used`."""
        request = call.message
        what = f"the arguments of {request.function}"
        if call.short is not None:
            values = call.short.values(attachments)
            receive_call(self._peer.engine, call.metadata, values, link, what)
            args, names = values.values(), call.short.plan.names
            if not names:
                return args, {}
            first = len(args) - len(names)
            return args[:first], dict(zip(names, args[first:], strict=True))
        decoder = wire.Decoder(
            request.tensors,
            attachments,
            limits=self._limits,
            types=self._registry.types,
            resolve_ref=partial(self._resolve_ref, used),
        )
        if link is not None:
            link.count_saved(decoder.saved)
        _put_on_devices(decoder, request.devices)
        compression = request.compression if request.HasField("compression") else None
        receive_call(self._peer.engine, call.metadata, decoder, link, what, compression)
        args = [decoder.value(value, f"args[{index}]") for index, value in enumerate(request.args)]
        kwargs = {}
        if request.kwargs:  # checked first, because iterating over a protobuf map is slow even if it is empty
            kwargs = {name: decoder.value(request.kwargs[name], name) for name in _names_in_order(request)}
        call.keep_plan(args, kwargs)
        return args, kwargs

    # -- refs

    def release(self, release_numbers: Sequence[int]) -> None:
        """Releases refs that were issued for a response that is not read."""
        self._objects.release(release_numbers)

    def _ref_of(self, value: object, owner: int, release_numbers: list[int]) -> value_pb2.RemoteRef | None:
        """The ref to send instead of a value; None if the value is sent by its content.

        An object of an exposed class is stored for this. Other objects are sent as refs if they are stored.
        """
        if isinstance(value, IssuedRef):
            return self._objects.to_proto(value, self._peer.identity.id)
        if is_data(value) or self._registry.is_record(value):
            return None
        if self._registry.is_instance_of_exposed_class(value):
            issued: IssuedRef | None = self._objects.issue_ref(value, owner)
        else:
            issued = self._objects.issue_ref_if_stored(value, owner)
        if issued is None:
            return None
        release_numbers.append(issued.release_number)
        return self._objects.to_proto(issued, self._peer.identity.id)

    def _resolve_ref(self, used: list[StoredObject], ref: value_pb2.RemoteRef) -> object:
        """The object itself if it is stored here, else a handle to the object on its own worker."""
        # The peer is checked even if there is a name: another worker may have another object of that name.
        if ref.peer.id not in self._objects.peers:
            return handle_for(ref, self._peer)
        used.append(self._objects.resolve(ref))
        return used[-1].value

    # -- recipes

    def _recipe(
        self,
        function: ExposedFunction,
        request: autograd_pb2.ForwardWithAutogradRequest,
        server_call: ServerCall,
    ) -> Recipe | None:
        """How to recreate a named object after a restart; None if it need not, or cannot, be recreated."""
        if not request.keep.name or not self._objects.needs_recipes:
            return None
        saved_request = autograd_pb2.ForwardWithAutogradRequest()
        saved_request.CopyFrom(request)
        for unneeded in ("autograd", "released"):
            saved_request.ClearField(unneeded)
        for ref in _refs_in(saved_request):
            if ref.peer.id in self._objects.peers:
                if not ref.name:
                    return None  # an object without a name is gone after a restart
                ref.peer.id = 0
        attachments = tuple(memory.tobytes() for memory in server_call.request.attachments)
        return Recipe(function.name, saved_request.SerializeToString(), attachments)

    def recreate(self, recipe: Recipe) -> object:
        """The object that a recipe makes."""
        call = CallRequest(recipe.request, None)
        request = call.message
        for ref in _refs_in(request):
            ref.peer.id = ref.peer.id or self._peer.identity.id
        with ExitStack() as stack:
            stack.enter_context(entered(Scope(self._peer, detect_anomaly=request.modes.detect_anomaly)))
            if request.HasField("modes"):
                stack.enter_context(applied_modes(request.modes))
            target, function = self._find_function(request)
            attachments = [
                numpy.frombuffer(bytearray(attachment), numpy.uint8) for attachment in recipe.attachments
            ]
            args, kwargs = self._arguments(call, attachments, None, [])
            return _call(function, target, args, kwargs)


def _call(
    function: ExposedFunction,
    target: StoredObject | None,
    args: list[object],
    kwargs: dict[str, object],
) -> object:
    if target is not None:
        args.insert(0, target.value)
    function.check_arguments(args, kwargs)
    result = function.value(*args, **kwargs)
    return asyncio.run(result) if isinstance(result, CoroutineType) else result


def _refs_in(request: autograd_pb2.ForwardWithAutogradRequest) -> Iterator[value_pb2.RemoteRef]:
    """All refs in the target and the arguments of a call."""
    if request.HasField("target"):
        yield request.target
    yield from wire.refs_in([*request.args, *request.kwargs.values()])


def _names_in_order(request: autograd_pb2.ForwardWithAutogradRequest) -> list[str]:
    """The names of the keyword arguments, in the order in which they were given."""
    given = dict.fromkeys(request.kwarg_names)
    if not given.keys() <= request.kwargs.keys():
        raise MalformedMessage("the name of a keyword argument that there is not")
    return [*given, *sorted(name for name in request.kwargs if name not in given)]


def _owner_of_new_objects(request: autograd_pb2.ForwardWithAutogradRequest, server_call: ServerCall) -> int:
    """The peer id of the client that owns the objects which a call makes; 0 if it is not known."""
    if server_call.link is not None:
        return server_call.link.peer.id
    if request.keep.name or not request.HasField("autograd"):
        return 0
    return request.autograd.context.peer


def _put_on_devices(decoder: wire.Decoder, devices: Sequence[str]) -> None:
    if len(devices) > len(decoder.tensors):
        raise MalformedMessage(f"{len(devices)} devices for {len(decoder.tensors)} tensors")
    for index, device in enumerate(devices):
        if device:
            try:
                decoder.tensors[index] = decoder.tensors[index].to(device)
            except (RuntimeError, NotImplementedError, AssertionError, ImportError) as error:
                # ImportError: torch knows names of devices whose support is a package of its own.
                raise InvalidDeviceMap(f"a tensor cannot be put on {device!r} here: {error}") from None
