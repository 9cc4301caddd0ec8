"""The dataclasses, named tuples and enums that both ends know by name.

Only the name of a type is sent. The receiver looks it up in its registry, so a message can only make it use
types that it has registered.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

__all__ = ["TypeRegistry", "default_types", "is_named_tuple", "register_type"]

AnyType = TypeVar("AnyType", bound=type)

_INIT_VARIABLE = getattr(dataclasses, "_FIELD_INITVAR", object())


def is_named_tuple(cls: type) -> bool:
    """Whether a class was made by typing.NamedTuple or collections.namedtuple."""
    fields = getattr(cls, "_fields", None)
    return issubclass(cls, tuple) and isinstance(fields, tuple) and hasattr(cls, "_make")


def _check_can_travel(cls: type) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"{cls!r} is not a class")
    if issubclass(cls, enum.Enum) or is_named_tuple(cls):
        return
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__qualname__} is neither a dataclass nor a named tuple nor an enum")
    for name, field in cls.__dataclass_fields__.items():
        # An instance does not keep its InitVars, so the receiver could not call the constructor.
        is_init_variable = getattr(field, "_field_type", None) is _INIT_VARIABLE
        if is_init_variable and field.default is dataclasses.MISSING:
            raise TypeError(
                f"{cls.__qualname__}.{name} is an InitVar without a default, which instances do not keep"
            )


class TypeRegistry:
    """Names -> dataclasses, named tuples and enums. Safe to use from several threads."""

    def __init__(self, *, open: bool = False) -> None:
        """`open`: a type is registered under its `__qualname__` when a value of it is first sent."""
        self.open = open
        self._lock = threading.Lock()
        self._types: dict[str, type] = {}
        self._names: dict[type, str] = {}

    @overload
    def register(self, cls: AnyType, name: str | None = None) -> AnyType: ...
    @overload
    def register(self, cls: None = None, name: str | None = None) -> Callable[[AnyType], AnyType]: ...
    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Makes a type known under a name, by default its `__qualname__`. Also a decorator.

        Raises ValueError if another type has the name. A type that is defined again, as by a notebook cell
        that is run twice, replaces the old one.
        """
        if cls is None:
            return lambda decorated: self.register(decorated, name)
        _check_can_travel(cls)
        name = cls.__qualname__ if name is None else name
        with self._lock:
            known = self._types.get(name)
            if known is not None and known is not cls and not _same_definition(known, cls):
                raise ValueError(
                    f"the name {name!r} is taken by {known.__module__}.{known.__qualname__}; "
                    f"register {cls.__module__}.{cls.__qualname__} under another one with name="
                )
            self._types[name] = cls
            self._names[cls] = name
        return cls

    def name_of(self, cls: type) -> str:
        """The name under which values of a type are sent. Raises LookupError if the type is not
        registered."""
        name = self._names.get(cls)
        if name is not None:
            return name
        if not self.open:
            raise LookupError(
                f"type {cls.__module__}.{cls.__qualname__} is not registered; a worker exposes it with "
                f"@gradwire_server.expose, or TypeRegistry.register makes it known"
            )
        try:
            self.register(cls)
        except (TypeError, ValueError) as error:
            raise LookupError(str(error)) from error
        return self._names[cls]

    def type_of(self, name: str) -> type:
        """The type of a name. Raises LookupError if there is none, with a message that says what to do."""
        cls = self._types.get(name)
        if cls is None:
            raise LookupError(
                f"the receiving end knows no type {name!r}; register the class with "
                f"gradwire.register_type(cls, name={name!r}) on a client, "
                f"or expose it with @gradwire_server.expose on a worker"
            )
        return cls

    def names(self) -> list[str]:
        """All names, sorted."""
        with self._lock:
            return sorted(self._types)


def _same_definition(one: type, other: type) -> bool:
    return one.__module__ == other.__module__ and one.__qualname__ == other.__qualname__


default_types = TypeRegistry(open=True)
"""The registry of a client."""

register_type = default_types.register
"""Makes a dataclass, named tuple or enum known to this client. Also a decorator."""
