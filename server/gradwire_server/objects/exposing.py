"""`expose`: marks what a module lets clients call, and remembers it for the workers that serve the module."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar, overload

__all__ = [
    "Instance",
    "definition_of",
    "expose",
    "expose_for",
    "exposed_earlier",
    "exposed_in",
    "exposed_name",
    "is_function_or_class",
]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _Exposure:
    value: object
    name: str
    module: str
    """The module that exposed the value, which is not always the module that defines it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """An object to serve under a name, whether or not it was exposed under another name."""

    name: str
    value: object

    def __post_init__(self) -> None:
        _check_name(self.name)


def _check_name(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")) or name.startswith("_"):
        raise ValueError(f"{name!r} cannot be exposed: a name is made of letters, digits, _ and dots")


_exposures: dict[int, _Exposure] = {}
"""By the id of the value, because instances need not be hashable, and because a subclass of an exposed class
is not exposed itself. In the order in which the values were exposed."""


@overload
def expose(value: T, /, *, name: str | None = None) -> T: ...
@overload
def expose(*, name: str | None = None) -> Callable[[T], T]: ...
def expose(value: Any = None, /, *, name: str | None = None) -> Any:
    """Lets clients call a function or class, or pass a dataclass or enum, by name.

    >>> import gradwire_server as gws
    >>> @gws.expose
    ... def double(x):
    ...     return 2 * x
    >>> @gws.expose(name="half")
    ... def _half(x):
    ...     return x / 2

    An object that is neither function nor class needs a `name`: ``gws.expose(encoder, name="encoder")``.

    A function or class that is defined again, in a notebook's cell that is run again or by
    `importlib.reload`, replaces the earlier definition. A worker that runs already goes on with the
    definition it was made with.
    """
    module = sys._getframe(1).f_globals.get("__name__", "")
    if value is None:
        return lambda decorated: expose_for(module, decorated, name)
    return expose_for(module, value, name)


def expose_for(module: str, value: T, name: str | None = None) -> T:
    """Exposes a value as if the module of that name did."""
    name = name or getattr(value, "__name__", None)
    if name is None:
        raise TypeError(f"a {type(value).__name__} is exposed under a name: expose(obj, name=...)")
    _check_name(name)
    _exposures.pop(id(value), None)
    _exposures[id(value)] = new = _Exposure(value, name, module)
    if not is_function_or_class(value):
        # An instance that was replaced is forgotten here, because it may be a large model. Functions and
        # classes are small, and stay: other modules may have imported the earlier definition.
        for old in [old for old in _exposures.values() if old is not new and _is_redefinition(new, old)]:
            del _exposures[id(old.value)]
    return value


def exposed_in(module: ModuleType) -> list[tuple[str, object]]:
    """The names and values that a module exposes, or has imported from a module that exposed them."""
    imported = {id(value) for value in vars(module).values()}
    found = [
        exposure
        for value_id, exposure in _exposures.items()
        if exposure.module == module.__name__ or value_id in imported
    ]
    newest = _without_redefined(found)
    return sorted(((exposure.name, exposure.value) for exposure in newest), key=lambda pair: pair[0])


def exposed_name(value: object) -> str | None:
    """The name under which a value was exposed; None if it was not exposed."""
    exposure = _exposures.get(id(value))
    return exposure.name if exposure is not None and exposure.value is value else None


def exposed_earlier(value: object, other: object) -> bool:
    """Whether `value` was exposed before `other`. Values that were never exposed count as the latest."""
    order = {value_id: index for index, value_id in enumerate(_exposures)}
    return order.get(id(value), len(order)) < order.get(id(other), len(order))


def definition_of(value: object) -> tuple[str, str]:
    """The module and the qualified name of a function or class, or of the class of an object."""
    defined: Any = value if is_function_or_class(value) else type(value)
    return defined.__module__, defined.__qualname__


def is_function_or_class(value: object) -> bool:
    """Whether a value is a function or a class, rather than an instance."""
    return inspect.isclass(value) or inspect.isroutine(value)


def _is_redefinition(new: _Exposure, old: _Exposure) -> bool:
    """Whether the same module exposed the same definition again, under the same name."""
    return (
        new.name == old.name
        and new.module == old.module
        and definition_of(new.value) == definition_of(old.value)
    )


def _without_redefined(exposures: Iterable[_Exposure]) -> Iterator[_Exposure]:
    """The exposures, which come in their order, without those that a later exposure redefines."""
    by_name: dict[str, list[_Exposure]] = {}
    for exposure in exposures:
        same_name = by_name.setdefault(exposure.name, [])
        same_name[:] = [earlier for earlier in same_name if not _is_redefinition(exposure, earlier)]
        same_name.append(exposure)
    return itertools.chain.from_iterable(by_name.values())
