"""One named object <-> what the state directory holds of it."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.torch_internals import set_state_metadata, state_metadata, storage_id, version_of
from gradwire_server.objects.store import HeldObject, ObjectStore, Recipe

__all__ = ["Mark", "Misfit", "copied_object", "mark_of", "restore_object"]


class Misfit(Exception):
    """What was saved of an object does not fit what is served now."""


class Mark:
    """Equal to another if nothing has changed between the two. Without content it is equal to none."""

    def __init__(self, content: object = None) -> None:
        self._content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mark) and self._content is not None and self._content == other._content

    __hash__ = None  # type: ignore[assignment]


def mark_of(held: HeldObject) -> Mark:
    """What changes whenever the object does, found without reading its tensors."""
    value = held.value
    if not isinstance(value, torch.nn.Module):
        return Mark() if _has_state(value) else Mark((held.name, held.number))
    parts = list(value.modules())
    if any(type(part).get_extra_state is not torch.nn.Module.get_extra_state for part in parts):
        return Mark()
    try:
        tensors = [
            (name, tensor.data_ptr(), version_of(tensor), tensor.shape, tensor.dtype, tensor.requires_grad)
            for name, tensor in itertools.chain(value.named_parameters(), value.named_buffers())
        ]
    except (RuntimeError, ValueError):
        return Mark()  # of inference mode, or lazy: they do not tell
    return Mark((held.name, held.number, held.changes, tensors, [part.training for part in parts]))


def _has_state(value: object) -> bool:
    return all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict"))


def copied_object(held: HeldObject) -> dict[str, Any]:
    """All that is needed to have the object again."""
    value = held.value
    recipe = held.recipe
    entry: dict[str, Any] = {
        "name": held.name,
        "number": held.number,
        "class_name": type(value).__name__,
        "allow_stale": held.allow_stale,
        "recipe": None,
        "state": None,
    }
    if recipe is not None:
        entry["recipe"] = [recipe.class_name, recipe.arguments, list(recipe.attachments)]
    if isinstance(value, torch.nn.Module):
        state = value.state_dict()
        memo: dict[object, torch.Tensor] = {}
        entry["state"] = _copied(dict(state), memo)
        entry["versions"] = _copied(dict(state_metadata(state) or {}), memo)
        entry["devices"] = {
            key: str(item.device)
            for key, item in state.items()
            if isinstance(item, torch.Tensor) and item.device.type != "cpu"
        }
        entry["evaluating"] = [name for name, part in value.named_modules() if not part.training]
        entry["frozen"] = [name for name, one in value.named_parameters() if not one.requires_grad]
    elif _has_state(value):
        entry["state"] = _copied(value.state_dict(), {})
    return entry


def _copied(value: Any, memo: dict[object, torch.Tensor]) -> Any:
    """A copy in which what shares memory does so, too, and is stored once."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value.detach().to("cpu", copy=True)
        place = (storage_id(value), value.storage_offset(), value.shape, value.stride())
        key = (*place, value.dtype, value.is_conj(), value.is_neg())
        if key not in memo:
            memo[key] = value.detach().to("cpu", copy=True)
        return memo[key]
    if isinstance(value, Mapping):
        return {key: _copied(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item, memo) for item in value)
    return value


def restore_object(
    entry: Mapping[str, Any], objects: ObjectStore, make_again: Callable[[Recipe], object]
) -> None:
    """Makes an object again if the worker's own code has not, and puts it in the state that it had."""
    name = entry["name"]
    known = next((held for held in objects.named() if held.name == name), None)
    if known is not None:
        value = known.value
    elif entry["recipe"] is None:
        raise Misfit("it was an object that the worker's own code exposed, and no longer does")
    else:
        class_name, arguments, attachments = entry["recipe"]
        recipe = Recipe(class_name, arguments, tuple(attachments))
        try:
            value = make_again(recipe)
        except Exception as error:  # of the user's class
            raise Misfit(f"it cannot be made again: {type(error).__name__}: {error}") from error
    if entry["state"] is not None:
        _restore_state(value, entry)
    if known is None:
        # After the state, which may put its parameters elsewhere: from here on others refer to them.
        objects.keep(value, owner=None, name=name, allow_stale=entry["allow_stale"], recipe=recipe)


def _restore_state(value: Any, entry: Mapping[str, Any]) -> None:
    if not _has_state(value):
        raise Misfit(f"it has a state, and is a {type(value).__name__} now, which has none")
    state = OrderedDict(entry["state"])
    if not isinstance(value, torch.nn.Module):
        try:
            value.load_state_dict(dict(state))
        except Exception as error:  # of the user's class
            raise Misfit(f"it does not take its state: {type(error).__name__}: {error}") from error
        return
    set_state_metadata(state, OrderedDict(entry["versions"]))
    _put_as_saved(value, state, entry["devices"])
    try:
        value.load_state_dict(state)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise Misfit(" ".join(str(error).split())) from error
    evaluating, frozen = set(entry["evaluating"]), set(entry["frozen"])
    for name, part in value.named_modules():
        part.training = name not in evaluating
    for name, parameter in value.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _put_as_saved(module: torch.nn.Module, state: Mapping[str, Any], devices: Mapping[str, str]) -> None:
    """Somebody may have changed the dtype or the device of the module after it was made."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        saved = state.get(name)
        if not isinstance(saved, torch.Tensor) or torch.nn.parameter.is_lazy(tensor):
            continue
        device = devices.get(name, "cpu")
        if tensor.dtype != saved.dtype or str(tensor.device) != device:
            try:
                # Not another tensor: what is tied to it stays tied.
                tensor.data = tensor.data.to(device=device, dtype=saved.dtype)
            except (RuntimeError, AssertionError) as error:
                raise Misfit(f"{name} cannot be put on {device}: {error}") from error
