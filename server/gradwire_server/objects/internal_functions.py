"""Functions that every worker serves to gradwire's own clients, under names that no listing shows.

They are what handles of objects, `gradwire.nn` and `gradwire.optim` call on a worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

import gradwire
from gradwire.errors import WrongArguments
from gradwire.peers.current import current_peer
from gradwire.proto.v1 import value_pb2
from gradwire.runtime.scope import current_scope
from gradwire.torch_internals import set_state_metadata, state_metadata
from gradwire.training.stepping import unscaled
from gradwire_server.objects.optimizers import OptimizerFactory
from gradwire_server.objects.registry import Registry
from gradwire_server.objects.store import ObjectStore
from gradwire_server.objects.stored import IssuedRef, StoredObject

__all__ = ["add_internal_functions"]


def add_internal_functions(registry: Registry, objects: ObjectStore) -> None:
    """Registers the functions of this module, each under a name that begins with "gradwire."."""
    of_objects = _ObjectFunctions(objects)
    registry.add_internal("gradwire.get", of_objects.get)
    registry.add_internal("gradwire.fetch", of_objects.fetch)
    registry.add_internal("gradwire.delete", of_objects.delete)
    for function in (
        train,
        zero_grad,
        requires_grad_,
        num_parameters,
        of_objects.to,
        state_sizes,
        of_objects.state_dict,
        of_objects.load_state_dict,
    ):
        registry.add_internal(f"gradwire.module.{function.__name__}", function)
    registry.add_internal("gradwire.unscale", unscale)
    registry.add_internal("gradwire.forget_error_feedback", forget_error_feedback)
    registry.add_internal("gradwire.optimizer", OptimizerFactory(registry, objects).create)


class _ObjectFunctions:
    """The internal functions that need the object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def get(self, name: str) -> IssuedRef:
        return IssuedRef(self._objects.resolve(value_pb2.RemoteRef(name=name)))

    def fetch(self, value: object) -> object:
        return value

    def delete(self, peer: int, number: int, name: str) -> None:
        ref = value_pb2.RemoteRef(peer=value_pb2.PeerId(id=peer), ref=number, name=name)
        server_call = current_scope().server_call
        link = None if server_call is None else server_call.link
        self._objects.delete(self._objects.resolve(ref), requester=0 if link is None else link.peer.id)

    def to(self, module: torch.nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
        with self._objects.parameters.reserved_and_written(self._stored(module)):
            module.to(device=device, dtype=dtype)

    def state_dict(self, module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state, and the metadata that torch attaches to it: the versions of its modules."""
        with self._objects.parameters.reserved(self._stored(module)):
            state = module.state_dict()
            # Copies, because the parameters may change while the response is being sent.
            copies = {name: _copy(value) for name, value in state.items()}
        return copies, dict(state_metadata(state) or {})

    def load_state_dict(
        self,
        module: torch.nn.Module,
        state: Mapping[str, Any],
        metadata: Mapping[str, Any],
        strict: bool,
    ) -> tuple[list[str], list[str], str]:
        """Missing keys, unexpected keys, and torch's message if it does not accept the state."""
        with_metadata = OrderedDict(state)
        set_state_metadata(with_metadata, OrderedDict(metadata))
        with self._objects.parameters.reserved_and_written(self._stored(module)):
            try:
                keys = module.load_state_dict(with_metadata, strict=strict)
            except RuntimeError as error:
                return [], [], str(error)
        return list(keys.missing_keys), list(keys.unexpected_keys), ""

    def _stored(self, value: object) -> list[StoredObject]:
        """The entry of a module; none if it is not in the store. Raises WrongArguments if it is no module."""
        stored = self._objects.find(_checked_module(value))
        return [] if stored is None else [stored]


def forget_error_feedback() -> None:
    """Drops the rounding errors that would be added to the next compressed gradients for the caller."""
    server_call = current_scope().server_call
    if server_call is not None and server_call.link is not None:
        current_peer().engine.feedback.forget(server_call.link.peer.id)


def train(module: torch.nn.Module, mode: bool) -> None:
    _checked_module(module).train(mode)


def zero_grad(module: torch.nn.Module) -> None:
    gradwire.current_context().zero_grad(_checked_module(module).parameters())


def unscale(modules: list[torch.nn.Module], inverse_scale: float) -> bool:
    """Takes the factor of a GradScaler out of all gradients. Returns whether any gradient is not finite."""
    # Each parameter once: modules may share parameters.
    parameters = dict.fromkeys(
        parameter for module in modules for parameter in _checked_module(module).parameters()
    )
    finite: list[bool] = []

    def change(gradient: torch.Tensor) -> torch.Tensor:
        result, is_finite = unscaled(gradient, inverse_scale)
        finite.append(is_finite)
        return result

    gradwire.current_context().change_gradients(parameters, change)
    return not all(finite)


def requires_grad_(module: torch.nn.Module, requires_grad: bool) -> None:
    _checked_module(module).requires_grad_(requires_grad)


def num_parameters(module: torch.nn.Module, trainable_only: bool) -> int:
    return sum(
        p.numel() for p in _checked_module(module).parameters() if p.requires_grad or not trainable_only
    )


def state_sizes(module: torch.nn.Module) -> dict[str, tuple[list[int], int] | None]:
    """The shape and the bytes of each tensor of the state; None for an entry that is no tensor."""
    return {
        name: (list(value.shape), value.numel() * value.itemsize) if isinstance(value, torch.Tensor) else None
        for name, value in _checked_module(module).state_dict().items()
    }


def _checked_module(value: object) -> torch.nn.Module:
    if not isinstance(value, torch.nn.Module):
        raise WrongArguments(f"a {type(value).__name__} is no torch.nn.Module")
    return value


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
