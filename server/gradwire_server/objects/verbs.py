"""What gradwire's own clients ask of a worker's objects and modules: functions that are not listed."""

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
from gradwire_server.objects.optimizers import Optimizers
from gradwire_server.objects.registry import Registry
from gradwire_server.objects.store import KeptResult, ObjectStore

__all__ = ["add_training"]


def add_training(registry: Registry, objects: ObjectStore) -> None:
    """Serves the parts that `gradwire.nn` and `gradwire.optim` call."""
    verbs = _Verbs(objects)
    registry.add_internal("gradwire.get", verbs.get)
    registry.add_internal("gradwire.fetch", verbs.fetch)
    registry.add_internal("gradwire.delete", verbs.delete)
    for verb in (
        train,
        zero_grad,
        requires_grad_,
        num_parameters,
        verbs.to,
        state_sizes,
        verbs.state_dict,
        verbs.load_state_dict,
    ):
        registry.add_internal(f"gradwire.module.{verb.__name__}", verb)
    registry.add_internal("gradwire.unscale", unscale)
    registry.add_internal("gradwire.forget_error_feedback", forget_error_feedback)
    registry.add_internal("gradwire.optimizer", Optimizers(registry, objects).make)


class _Verbs:
    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def get(self, name: str) -> KeptResult:
        return KeptResult(self._objects.find(value_pb2.RemoteRef(name=name)))

    def fetch(self, value: object) -> object:
        return value

    def delete(self, peer: int, number: int, name: str) -> None:
        ref = value_pb2.RemoteRef(peer=value_pb2.PeerId(id=peer), ref=number, name=name)
        server_call = current_scope().server_call
        link = None if server_call is None else server_call.link
        self._objects.delete(self._objects.find(ref), requester=0 if link is None else link.peer.id)

    def to(self, module: torch.nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
        with self._objects.changing([_module(module)]):
            module.to(device=device, dtype=dtype)

    def state_dict(self, module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state, and what torch notes beside it: the versions of its modules."""
        with self._objects.unchanging([_module(module)]):
            state = module.state_dict()
            # Copies: the values must not change while they are on their way.
            copies = {name: _copy(value) for name, value in state.items()}
        return copies, dict(state_metadata(state) or {})

    def load_state_dict(
        self,
        module: torch.nn.Module,
        state: Mapping[str, Any],
        metadata: Mapping[str, Any],
        strict: bool,
    ) -> tuple[list[str], list[str], str]:
        """Missing keys, unexpected keys, and what else torch has to say against the state."""
        whole = OrderedDict(state)
        set_state_metadata(whole, OrderedDict(metadata))
        with self._objects.changing([_module(module)]):
            try:
                keys = module.load_state_dict(whole, strict=strict)
            except RuntimeError as error:
                return [], [], str(error)
        return list(keys.missing_keys), list(keys.unexpected_keys), ""


def forget_error_feedback() -> None:
    """What rounding left out of gradients for the caller is not added to later ones."""
    server_call = current_scope().server_call
    if server_call is not None and server_call.link is not None:
        current_peer().engine.feedback.forget(server_call.link.peer.id)


def train(module: torch.nn.Module, mode: bool) -> None:
    _module(module).train(mode)


def zero_grad(module: torch.nn.Module) -> None:
    gradwire.current_context().zero_grad(_module(module).parameters())


def unscale(modules: list[torch.nn.Module], inverse_scale: float) -> bool:
    """Takes the factor of a GradScaler out of all gradients. Whether there were any that are not finite."""
    # Once each: modules may share parameters.
    parameters = dict.fromkeys(parameter for module in modules for parameter in _module(module).parameters())
    finite: list[bool] = []

    def change(gradient: torch.Tensor) -> torch.Tensor:
        result, is_finite = unscaled(gradient, inverse_scale)
        finite.append(is_finite)
        return result

    gradwire.current_context().change_gradients(parameters, change)
    return not all(finite)


def requires_grad_(module: torch.nn.Module, requires_grad: bool) -> None:
    _module(module).requires_grad_(requires_grad)


def num_parameters(module: torch.nn.Module, trainable_only: bool) -> int:
    return sum(p.numel() for p in _module(module).parameters() if p.requires_grad or not trainable_only)


def state_sizes(module: torch.nn.Module) -> dict[str, tuple[list[int], int] | None]:
    """The shape and the bytes of each tensor of the state; None for what is no tensor."""
    return {
        name: (list(value.shape), value.numel() * value.itemsize) if isinstance(value, torch.Tensor) else None
        for name, value in _module(module).state_dict().items()
    }


def _module(value: object) -> torch.nn.Module:
    if not isinstance(value, torch.nn.Module):
        raise WrongArguments(f"a {type(value).__name__} is no torch.nn.Module")
    return value


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
