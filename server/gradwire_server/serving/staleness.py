"""Checks that a backward still fits the parameters that its forward computed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradwire.errors import StaleParameters
from gradwire.torch_internals import storage_id, tree_map_only, version_of
from gradwire_server.objects.access import ReadGuard
from gradwire_server.objects.stored import StoredObject

__all__ = ["staleness_check", "unshared_result"]

_MOST_NAMES = 5
"""How many parameters an error names."""


def staleness_check(used: Sequence[StoredObject], guard: ReadGuard) -> Callable[[], None]:
    """Returns a check to call before the backward of the forward that now uses these objects.

    The check raises StaleParameters if parameters changed since, except those of modules that allow that, or
    if they were written while the forward computed with them.
    """
    strict = [stored for stored in used if not stored.allow_stale and _is_module(stored)]
    versions = [
        (name, parameter, version_of(parameter))
        for stored in strict
        for name, parameter in stored.value.named_parameters()
    ]
    # Writes are counted beside the version counters: a module that allows stale parameters and shares some
    # with these puts the version counters back.
    unversioned = [
        (parameter_set, parameter_set.unversioned_writes)
        for stored in strict
        for parameter_set in stored.parameter_sets
    ]
    class_names = ", ".join(dict.fromkeys(type(stored.value).__name__ for stored in used))

    def check() -> None:
        if guard.is_overtaken:
            raise StaleParameters(
                f"{class_names}: an optimizer step was made during the forward, which took too long to wait "
                "for; run it again"
            )
        stale = [name for name, parameter, version in versions if version_of(parameter) != version]
        if stale or any(parameter_set.unversioned_writes != count for parameter_set, count in unversioned):
            more = f" and {len(stale) - _MOST_NAMES} more" if len(stale) > _MOST_NAMES else ""
            shown = ", ".join(stale[:_MOST_NAMES]) + more
            error = StaleParameters(
                f"{class_names}: {shown or 'parameters'} changed between the forward and this backward; run "
                'the forward again, or make the module with stale="allow" for asynchronous training'
            )
            error.parameters = tuple(stale)
            raise error

    return check


def unshared_result(result: object, used: Sequence[StoredObject]) -> object:
    """A result whose tensors share no memory with parameters that may change while the result is sent.

    Only modules that allow stale parameters matter: other changes are seen by the version counters.
    """
    modules = [stored.value for stored in used if stored.allow_stale and _is_module(stored)]
    if not modules:
        return result
    storages = {storage_id(parameter) for module in modules for parameter in module.parameters()}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        is_shared = tensor.layout is torch.strided and storage_id(tensor) in storages
        return tensor.clone() if is_shared else tensor

    return tree_map_only(torch.Tensor, copied, result)


def _is_module(stored: StoredObject) -> bool:
    return isinstance(stored.value, torch.nn.Module)
