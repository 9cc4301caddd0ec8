"""The registry: what one worker serves, which is what was exposed and nothing else, by name."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeGuard

import torch

from gradwire.errors import UnknownFunction, WrongArguments
from gradwire.proto.v1 import describe_pb2
from gradwire.wire import TypeRegistry
from gradwire_server.errors import NothingExposed
from gradwire_server.objects.describing import describe_callable, describe_type, signature_of
from gradwire_server.objects.exposing import (
    Instance,
    definition_of,
    exposed_earlier,
    exposed_in,
    exposed_name,
    is_function_or_class,
)

__all__ = ["ExposedFunction", "Registry"]

_MOST_CALL_SHAPES = 100
"""How many ways of calling one function are remembered."""


class ExposedFunction:
    """A function that clients can call: a function itself, a class, a callable object or a method."""

    def __init__(
        self,
        name: str,
        value: Callable[..., object],
        signature_from: Callable[..., object] | None = None,
    ) -> None:
        """`signature_from` is the callable that declares the arguments, if `value` itself does not."""
        self.name = name
        self.value = value
        self.signature = signature_of(signature_from or value)
        self.makes_objects = inspect.isclass(value)
        """Whether calling it makes an object that stays on the worker."""
        self._known_call_shapes: set[tuple[int, tuple[str, ...]]] = set()
        """Numbers of arguments with names of keywords that fit the signature. Remembered, as binding is
        slow."""

    def check_arguments(self, args: Sequence[object], kwargs: dict[str, object]) -> None:
        """Raises WrongArguments if the arguments do not fit the signature."""
        if self.signature is None:
            return
        call_shape = (len(args), tuple(kwargs))
        if call_shape in self._known_call_shapes:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise WrongArguments(
                f"{self.name}: {error}; its signature is {self.name}{self.signature}"
            ) from None
        if len(self._known_call_shapes) < _MOST_CALL_SHAPES:
            self._known_call_shapes.add(call_shape)


class Registry:
    """The functions, classes, instances and types of one worker."""

    def __init__(self, served: Iterable[object] = ()) -> None:
        """`served` are modules, functions, classes and objects, as `Worker` takes them."""
        self._functions: dict[str, ExposedFunction] = {}
        self._exposed_values: dict[str, object] = {}
        """The values behind `_functions`, as they were exposed."""
        self._internal: dict[str, ExposedFunction] = {}
        self._classes: set[type] = set()
        self.types = TypeRegistry(open=False)
        """The exposed dataclasses, named tuples and enums, whose values travel by content."""
        self._types_by_name: dict[str, type] = {}
        self.instances: dict[str, object] = {}
        """The objects that the worker's own code exposed, by name."""
        self.methods_of: Callable[[type], Mapping[str, object]] = lru_cache(self._find_methods)
        """The methods of a class that clients may call, by name."""
        for value in served:
            for name, exposed in _names_and_values(value):
                self.add(name, exposed)

    def add(self, name: str, value: object) -> None:
        """Serves a value under a name.

        Raises ValueError if a different value has that name already. Of two definitions of the same function
        or class the newer is served.
        """
        if _is_record_type(value):
            self.types.register(value, name)
            self._types_by_name.pop(name, None)
            self._types_by_name[name] = value
            return
        known = self._exposed_values.get(name, value)
        if known is not value:
            if not is_function_or_class(value) or definition_of(known) != definition_of(value):
                raise ValueError(f"two different things are exposed as {name!r}; give one another name=")
            if exposed_earlier(value, known):
                return
        self._exposed_values[name] = value
        if inspect.isclass(value):
            self._classes.add(value)
        elif not inspect.isroutine(value):
            self.instances[name] = value
        forward = value.forward if isinstance(value, torch.nn.Module) else None
        function = value if callable(value) else _not_callable(name, value)
        self._functions[name] = ExposedFunction(name, function, signature_from=forward)

    def add_internal(self, name: str, function: Callable[..., object]) -> None:
        """Serves a part of gradwire itself, which is not listed."""
        self._internal[name] = ExposedFunction(name, function)

    # -- looking up

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions, classes and instances, sorted."""
        return tuple(sorted(self._functions))

    def function(self, name: str, worker: str) -> ExposedFunction:
        """The function of a name. Raises UnknownFunction, which names the worker and similar functions."""
        function = self._functions.get(name) or self._internal.get(name)
        if function is not None:
            return function
        suggestions = difflib.get_close_matches(name, self._functions, n=3)
        hint = (
            f"did you mean {' or '.join(suggestions)}?"
            if suggestions
            else f"it serves: {', '.join(self.names) or 'nothing'}"
        )
        error = UnknownFunction(f"{worker} serves no function {name!r}; {hint}", worker=worker)
        error.suggestions = tuple(suggestions)
        raise error

    def exposed_class(self, name: str) -> type | None:
        """The exposed class of a name; None if there is none."""
        function = self._functions.get(name)
        return function.value if function is not None and inspect.isclass(function.value) else None

    def is_instance_of_exposed_class(self, value: object) -> bool:
        return type(value) in self._classes

    def is_record(self, value: object) -> bool:
        """Whether a value is of an exposed dataclass, named tuple or enum, and so travels by content."""
        return any(type(value) is type_ for type_ in self._types_by_name.values())

    # -- methods

    def method_names(self, class_: type) -> list[str]:
        return list(self.methods_of(class_))

    def method(self, value: object, name: str, worker: str) -> ExposedFunction:
        """A method of an object, or its __call__, as a function whose first argument is the object."""
        class_: Any = type(value)
        full_name = f"{class_.__name__}.{name}"
        if name == "__call__" and callable(value):
            # A module is called by __call__, so that its hooks run, with the arguments of its forward.
            forward = class_.forward if isinstance(value, torch.nn.Module) else None
            return ExposedFunction(full_name, class_.__call__, signature_from=forward)
        # Looked up on the class: functions in an instance's attributes are not for clients to call.
        found = self.methods_of(class_).get(name)
        if found is None:
            raise UnknownFunction(
                f"{class_.__name__} on {worker} has no method {name!r} that others may call"
                f"{self._why_not_callable(class_, name)}",
                worker=worker,
            )
        method: Callable[..., object] = getattr(class_, name)
        if isinstance(found, staticmethod | classmethod):
            return ExposedFunction(full_name, lambda _, *args, **kwargs: method(*args, **kwargs))
        return ExposedFunction(full_name, method)

    def _find_methods(self, class_: type) -> dict[str, object]:
        """The public methods that a class itself, or an exposed base of it, defines.

        Methods of a base that is not exposed are left out, because they may do anything: some of torch's
        modules can replace parameters by memory that was never written to, or write files.
        """
        methods = {
            name: value
            for name, (base, value) in _definitions(class_).items()
            if self._may_define(base, class_) and not name.startswith("_") and _is_method(value)
        }
        return dict(sorted(methods.items()))

    def _may_define(self, base: type, class_: type) -> bool:
        if _package(base) in ("torch", "builtins"):
            return False
        return base is class_ or base in self._classes or exposed_name(base) is not None

    def _why_not_callable(self, class_: type, name: str) -> str:
        base, value = _definitions(class_).get(name, (class_, None))
        if name.startswith("_") or not _is_method(value) or self._may_define(base, class_):
            return ""
        if _package(base) in ("torch", "builtins"):
            return f": it is inherited from {base.__module__}.{base.__qualname__}"
        return f": {base.__name__}, which defines it, is not exposed"

    # -- describing

    def describe(self) -> list[describe_pb2.Function]:
        functions = (self._functions[name] for name in self.names)
        return [
            describe_callable(function.name, function.value, function.signature, self.methods_of)
            for function in functions
        ]

    def describe_types(self) -> list[describe_pb2.ExposedType]:
        return [describe_type(name, type_) for name, type_ in self._types_by_name.items()]


def _names_and_values(served: object) -> list[tuple[str, object]]:
    """What an argument of `Worker` asks to serve: all that a module exposes, or a single value."""
    if isinstance(served, ModuleType):
        exposed = exposed_in(served)
        if not exposed:
            raise NothingExposed(
                f"module {served.__name__} exposes nothing; decorate what it should serve with "
                "@gradwire_server.expose"
            )
        return exposed
    if isinstance(served, Instance):
        return [(served.name, served.value)]
    name = exposed_name(served)
    if name is None:
        name = getattr(served, "__name__", type(served).__name__)
    return [(name, served)]


def _is_record_type(value: object) -> TypeGuard[type]:
    """Whether a value is a dataclass, an enum or a named tuple class."""
    return isinstance(value, type) and (
        dataclasses.is_dataclass(value)
        or issubclass(value, enum.Enum)
        or (issubclass(value, tuple) and hasattr(value, "_fields"))
    )


def _not_callable(name: str, value: object) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> object:
        raise WrongArguments(f"{name} is a {type(value).__name__} and cannot be called; call its methods")

    return refuse


def _definitions(class_: type) -> dict[str, tuple[type, object]]:
    """For each name in a class, the base that defines it, and the value there."""
    found: dict[str, tuple[type, object]] = {}
    for base in class_.__mro__:
        for name, value in vars(base).items():
            found.setdefault(name, (base, value))
    return found


def _is_method(value: object) -> bool:
    """Whether a value is a function written in Python, perhaps wrapped by a decorator."""
    if isinstance(value, staticmethod | classmethod):
        return True
    return callable(value) and not inspect.isclass(value) and inspect.isfunction(inspect.unwrap(value))


def _package(class_: type) -> str:
    return class_.__module__.partition(".")[0]
