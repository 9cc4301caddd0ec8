"""What gradwire's own clients ask of a worker's objects and modules: functions that are not listed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import gradwire
from gradwire.errors import WrongArguments
from gradwire.proto.v1 import value_pb2
from gradwire_server.objects import Objects
from gradwire_server.optimizers import Optimizers
from gradwire_server.registry import Registry

__all__ = ["add_training"]


def add_training(registry: Registry, objects: Objects) -> None:
    """Serves the parts that `gradwire.nn` and `gradwire.optim` call."""
    verbs = _Verbs(objects)
    registry.add_internal("gradwire.get", verbs.get)
    registry.add_internal("gradwire.fetch", verbs.fetch)
    registry.add_internal("gradwire.delete", verbs.delete)
    for verb in (
        train,
        zero_grad,
        requires_grad_,
        to,
        num_parameters,
        verbs.state_dict,
        verbs.load_state_dict,
    ):
        registry.add_internal(f"gradwire.module.{verb.__name__}", verb)
    registry.add_internal("gradwire.optimizer", Optimizers(registry, objects).make)


class _Verbs:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def get(self, name: str) -> object:
        return self._objects.find(value_pb2.RemoteRef(name=name)).value

    def fetch(self, value: object) -> object:
        return value

    def delete(self, value: object) -> None:
        held = self._objects.of(value)
        if held is not None:
            self._objects.delete(held)

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        with self._objects.unchanging([_module(module)]):
            # Copies: the values must not change while they are on their way.
            return {name: _copy(value) for name, value in module.state_dict().items()}

    def load_state_dict(
        self, module: torch.nn.Module, state: Mapping[str, Any], strict: bool
    ) -> tuple[list[str], list[str]]:
        with self._objects.unchanging([_module(module)]):
            try:
                keys = module.load_state_dict(state, strict=strict)
            except RuntimeError as error:
                raise WrongArguments(str(error)) from None
        return list(keys.missing_keys), list(keys.unexpected_keys)


def train(module: torch.nn.Module, mode: bool) -> None:
    _module(module).train(mode)


def zero_grad(module: torch.nn.Module) -> None:
    gradwire.current_context().zero_grad(_module(module).parameters())


def requires_grad_(module: torch.nn.Module, requires_grad: bool) -> None:
    _module(module).requires_grad_(requires_grad)


def to(module: torch.nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    _module(module).to(device=device, dtype=dtype)


def num_parameters(module: torch.nn.Module, trainable_only: bool) -> int:
    return sum(p.numel() for p in _module(module).parameters() if p.requires_grad or not trainable_only)


def _module(value: object) -> torch.nn.Module:
    if not isinstance(value, torch.nn.Module):
        raise WrongArguments(f"a {type(value).__name__} is no torch.nn.Module")
    return value


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
