"""Copies one named object for the state directory, and restores it from there."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.torch_internals import set_state_metadata, state_metadata, storage_id, version_of
from gradwire_server.objects.store import ObjectOptions, ObjectStore
from gradwire_server.objects.stored import Recipe, StoredObject

__all__ = ["Fingerprint", "IncompatibleState", "copied_object", "fingerprint_of", "restore_object"]


class IncompatibleState(Exception):
    """The saved state of an object does not fit what is served now."""


class Fingerprint:
    """Equals an earlier fingerprint of the same object if the object did not change in between.

    A fingerprint without content equals no other: it stands for an object whose changes cannot be seen.
    """

    def __init__(self, content: object = None) -> None:
        self._content = content

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Fingerprint) and self._content is not None and self._content == other._content
        )

    __hash__ = None  # type: ignore[assignment]


def fingerprint_of(stored: StoredObject) -> Fingerprint:
    """The fingerprint of an object, found without reading its tensors."""
    value = stored.value
    if not isinstance(value, torch.nn.Module):
        return Fingerprint() if _has_state(value) else Fingerprint((stored.name, stored.number))
    submodules = list(value.modules())
    if any(type(module).get_extra_state is not torch.nn.Module.get_extra_state for module in submodules):
        return Fingerprint()
    try:
        tensors = [
            (name, tensor.data_ptr(), version_of(tensor), tensor.shape, tensor.dtype, tensor.requires_grad)
            for name, tensor in itertools.chain(value.named_parameters(), value.named_buffers())
        ]
    except (RuntimeError, ValueError):
        return Fingerprint()  # tensors of inference mode have no version, lazy parameters no memory
    training = [module.training for module in submodules]
    return Fingerprint((stored.name, stored.number, stored.changes, tensors, training))


def _has_state(value: object) -> bool:
    return all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict"))


def copied_object(stored: StoredObject) -> dict[str, Any]:
    """All that is needed to restore the object."""
    value = stored.value
    recipe = stored.recipe
    entry: dict[str, Any] = {
        "name": stored.name,
        "number": stored.number,
        "class_name": type(value).__name__,
        "allow_stale": stored.allow_stale,
        "recipe": None,
        "state": None,
    }
    if recipe is not None:
        entry["recipe"] = [recipe.function_name, recipe.request, list(recipe.attachments)]
    if isinstance(value, torch.nn.Module):
        state = value.state_dict()
        copies: dict[object, torch.Tensor] = {}
        entry["state"] = _copied(dict(state), copies)
        entry["versions"] = _copied(dict(state_metadata(state) or {}), copies)
        entry["devices"] = {
            key: str(item.device)
            for key, item in state.items()
            if isinstance(item, torch.Tensor) and item.device.type != "cpu"
        }
        entry["evaluating"] = [name for name, module in value.named_modules() if not module.training]
        entry["frozen"] = [name for name, tensor in value.named_parameters() if not tensor.requires_grad]
    elif _has_state(value):
        entry["state"] = _copied(value.state_dict(), {})
    return entry


def _copied(value: Any, copies: dict[object, torch.Tensor]) -> Any:
    """A copy on the CPU. Tensors that are views of the same memory share one copy, so it is saved once."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value.detach().to("cpu", copy=True)
        memory = (storage_id(value), value.storage_offset(), value.shape, value.stride())
        key = (*memory, value.dtype, value.is_conj(), value.is_neg())
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, Mapping):
        return {key: _copied(item, copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item, copies) for item in value)
    return value


def restore_object(
    entry: Mapping[str, Any], objects: ObjectStore, recreate: Callable[[Recipe], object]
) -> None:
    """Restores an object to its saved state. Recreates it first if the worker's own code has not made it."""
    name = entry["name"]
    known = next((stored for stored in objects.named() if stored.name == name), None)
    if known is not None:
        value = known.value
    elif entry["recipe"] is None:
        raise IncompatibleState("it was an object that the worker's own code exposed, and no longer does")
    else:
        function_name, request, attachments = entry["recipe"]
        recipe = Recipe(function_name, request, tuple(attachments))
        try:
            value = recreate(recipe)
        except Exception as error:  # of the user's class
            raise IncompatibleState(f"it cannot be recreated: {type(error).__name__}: {error}") from error
    if entry["state"] is not None:
        _restore_state(value, entry)
    if known is None:
        # Added after its state was restored, which may replace the memory of its parameters: once the object
        # is in the store, parameter sets and optimizers refer to its parameters.
        options = ObjectOptions(name, allow_stale=entry["allow_stale"], recipe=recipe)
        objects.add(value, None, options)


def _restore_state(value: Any, entry: Mapping[str, Any]) -> None:
    if not _has_state(value):
        raise IncompatibleState(
            f"it was saved with a state, and is a {type(value).__name__} now, which has none"
        )
    state = OrderedDict(entry["state"])
    if not isinstance(value, torch.nn.Module):
        try:
            value.load_state_dict(dict(state))
        except Exception as error:  # of the user's class
            raise IncompatibleState(f"it does not take its state: {type(error).__name__}: {error}") from error
        return
    set_state_metadata(state, OrderedDict(entry["versions"]))
    _move_as_saved(value, state, entry["devices"])
    try:
        value.load_state_dict(state)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise IncompatibleState(" ".join(str(error).split())) from error
    evaluating, frozen = set(entry["evaluating"]), set(entry["frozen"])
    for name, module in value.named_modules():
        module.training = name not in evaluating
    for name, parameter in value.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _move_as_saved(module: torch.nn.Module, state: Mapping[str, Any], devices: Mapping[str, str]) -> None:
    """Gives parameters and buffers the dtype and the device of their saved state.

    A client may have changed those after it made the module.
    """
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        saved = state.get(name)
        if not isinstance(saved, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
            continue
        device = devices.get(name, "cpu")
        if tensor.dtype != saved.dtype or str(tensor.device) != device:
            try:
                # The same tensor with other data, so that tied parameters stay tied.
                tensor.data = tensor.data.to(device=device, dtype=saved.dtype)
            except (RuntimeError, AssertionError) as error:
                raise IncompatibleState(f"{name} cannot be put on {device}: {error}") from error
