"""What a worker serves: only what was exposed, by name."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeVar, overload

import torch

from gradwire.errors import UnknownFunction, WrongArguments
from gradwire.proto.v1 import describe_pb2
from gradwire.wire import TypeRegistry
from gradwire_server.errors import NothingExposed

__all__ = ["ExposedFunction", "Instance", "Registry", "expose", "expose_for", "exposed_in"]

_MOST_FITTING = 100
"""Ways of calling a function that are remembered."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _Exposed:
    value: object
    name: str
    module: str
    """The module that exposed it, which is not always the one that defines it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """An object to be shared by a name, whatever it is exposed as."""

    name: str
    value: object

    def __post_init__(self) -> None:
        _check_name(self.name)


def _check_name(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")) or name.startswith("_"):
        raise ValueError(f"{name!r} cannot be exposed: a name is made of letters, digits, _ and dots")


_exposed: dict[int, _Exposed] = {}
"""By identity: instances need not be hashable, and a subclass of an exposed class is not exposed itself. In
the order in which they were exposed."""


@overload
def expose(value: T, /, *, name: str | None = None) -> T: ...
@overload
def expose(*, name: str | None = None) -> Callable[[T], T]: ...
def expose(value: Any = None, /, *, name: str | None = None) -> Any:
    """Lets others call a function or class, or pass a dataclass or enum, by name.

    >>> import gradwire_server as gws
    >>> @gws.expose
    ... def double(x):
    ...     return 2 * x
    >>> @gws.expose(name="half")
    ... def _half(x):
    ...     return x / 2

    An object that is neither function nor class needs a `name`: ``gws.expose(encoder, name="encoder")``.

    What is defined anew, in a notebook's cell that is run again or by `importlib.reload`, takes the place of
    what it was. A worker that runs goes on with what it was made with.
    """
    module = sys._getframe(1).f_globals.get("__name__", "")
    if value is None:
        return lambda decorated: expose_for(module, decorated, name)
    return expose_for(module, value, name)


def expose_for(module: str, value: T, name: str | None = None) -> T:
    """Exposes something as if the module did."""
    name = name or getattr(value, "__name__", None)
    if name is None:
        raise TypeError(f"a {type(value).__name__} is exposed under a name: expose(obj, name=...)")
    _check_name(name)
    _exposed.pop(id(value), None)
    _exposed[id(value)] = entry = _Exposed(value, name, module)
    if not _has_source(value):
        # Classes and functions are small, and others may have imported them. A model is not, and is let go.
        for old in [old for old in _exposed.values() if old is not entry and _is_redefinition(entry, old)]:
            del _exposed[id(old.value)]
    return value


def _is_redefinition(new: _Exposed, old: _Exposed) -> bool:
    """Whether one thing is the other, defined anew: by the same module, by the same name in its source."""
    return (
        new.name == old.name and new.module == old.module and _definition(new.value) == _definition(old.value)
    )


def _definition(value: object) -> tuple[str, str]:
    """Where the source of a function or class is, or of the class of an object."""
    where: Any = value if _has_source(value) else type(value)
    return where.__module__, where.__qualname__


def _has_source(value: object) -> bool:
    """Whether it is a function or a class, and no object that such a one made."""
    return inspect.isclass(value) or inspect.isroutine(value)


def _age(value: object) -> int:
    """The later something was exposed the larger; what was not exposed, but named to be served, is latest."""
    return next((age for age, id_ in enumerate(_exposed) if id_ == id(value)), len(_exposed))


def _newest(entries: Iterable[_Exposed]) -> Iterator[_Exposed]:
    """Things that were exposed, in that order, without those that were defined anew later."""
    kept: dict[str, list[_Exposed]] = {}
    for entry in entries:
        of_that_name = kept.setdefault(entry.name, [])
        of_that_name[:] = [other for other in of_that_name if not _is_redefinition(entry, other)]
        of_that_name.append(entry)
    return itertools.chain.from_iterable(kept.values())


def exposed_in(module: ModuleType) -> list[tuple[str, object]]:
    """What a module exposes, and what it imported that was exposed elsewhere."""
    imported = {id(value) for value in vars(module).values()}
    found = [entry for id, entry in _exposed.items() if entry.module == module.__name__ or id in imported]
    return sorted(((entry.name, entry.value) for entry in _newest(found)), key=lambda pair: pair[0])


class ExposedFunction:
    """One thing that can be called."""

    def __init__(
        self, name: str, value: Callable[..., object], like: Callable[..., object] | None = None
    ) -> None:
        self.name = name
        self.value = value
        self.signature = _signature(like or value)
        """Of the function itself, or of the one that it is `like`."""
        self.makes_objects = inspect.isclass(value)
        """Whether calling it makes an object that stays here."""
        self._fitting: set[tuple[int, tuple[str, ...]]] = set()
        """Numbers of arguments, and names of keywords, that are known to fit: binding is slow."""

    def bind(self, args: Sequence[object], kwargs: dict[str, object]) -> None:
        """Raises WrongArguments if the arguments do not fit."""
        if self.signature is None:
            return
        given = (len(args), tuple(kwargs))
        if given in self._fitting:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise WrongArguments(
                f"{self.name}: {error}; its signature is {self.name}{self.signature}"
            ) from None
        if len(self._fitting) < _MOST_FITTING:
            self._fitting.add(given)

    def describe(self, methods_of: Callable[[type], Mapping[str, object]]) -> describe_pb2.Function:
        described = _describe_callable(self.name, self.value, self.signature)
        methods: Mapping[str, object] = {}
        if inspect.isclass(self.value):
            described.kind = describe_pb2.Function.KIND_CLASS
            methods = methods_of(self.value)
        elif inspect.isroutine(self.value):
            described.kind = describe_pb2.Function.KIND_FUNCTION
        else:
            described.kind = describe_pb2.Function.KIND_INSTANCE
            methods = methods_of(type(self.value))
        described.methods.extend(_describe_method(name, value) for name, value in methods.items())
        return described


class Registry:
    """The functions and types of one worker."""

    def __init__(self, served: Iterable[object] = ()) -> None:
        self._served: dict[str, ExposedFunction] = {}
        self._exposed: dict[str, object] = {}
        """What is served, as it was exposed."""
        self.types = TypeRegistry(open=False)
        self._type_names: list[tuple[str, type]] = []
        self._classes: set[type] = set()
        self._internal: dict[str, ExposedFunction] = {}
        self.instances: dict[str, object] = {}
        """Objects that the worker's own code exposed, by name."""
        self.methods_of: Callable[[type], Mapping[str, object]] = lru_cache(self._find_methods)
        """The methods of a class that others may call, by name."""
        for value in served:
            if isinstance(value, ModuleType):
                entries = exposed_in(value)
                if not entries:
                    raise NothingExposed(
                        f"module {value.__name__} exposes nothing; decorate what it should serve with "
                        "@gradwire_server.expose"
                    )
            elif isinstance(value, Instance):
                entries = [(value.name, value.value)]
            else:
                entry = _exposed.get(id(value))
                name = entry.name if entry else getattr(value, "__name__", type(value).__name__)
                entries = [(name, value)]
            for name, one in entries:
                self.add(name, one)

    def add(self, name: str, value: object) -> None:
        """Serves something under a name. A second thing of the same name is an error, unless one is the other
        defined anew: then the newer is served."""
        if isinstance(value, type) and (
            dataclasses.is_dataclass(value)
            or issubclass(value, enum.Enum)
            or (issubclass(value, tuple) and hasattr(value, "_fields"))
        ):
            self.types.register(value, name)
            self._type_names = [known for known in self._type_names if known[0] != name]
            self._type_names.append((name, value))
            return
        known = self._exposed.get(name, value)
        if known is not value:
            if not _has_source(value) or _definition(known) != _definition(value):
                raise ValueError(f"two different things are exposed as {name!r}; give one another name=")
            if _age(value) < _age(known):
                return
        self._exposed[name] = value
        if inspect.isclass(value):
            self._classes.add(value)
        elif not inspect.isroutine(value):
            self.instances[name] = value
        like = value.forward if isinstance(value, torch.nn.Module) else None
        self._served[name] = ExposedFunction(
            name, value if callable(value) else _not_callable(name, value), like
        )

    def add_internal(self, name: str, value: Callable[..., object]) -> None:
        """Serves a part of gradwire itself, which is not listed."""
        self._internal[name] = ExposedFunction(name, value)

    def is_instance_of_served(self, value: object) -> bool:
        return type(value) in self._classes

    def served_class(self, name: str) -> type | None:
        """The exposed class of a name."""
        served = self._served.get(name)
        return served.value if served is not None and inspect.isclass(served.value) else None

    def is_record(self, value: object) -> bool:
        """Whether it is of an exposed dataclass, named tuple or enum, and so travels itself."""
        return any(type(value) is type_ for _, type_ in self._type_names)

    def find(self, name: str, worker: str) -> ExposedFunction:
        served = self._served.get(name) or self._internal.get(name)
        if served is not None:
            return served
        suggestions = difflib.get_close_matches(name, self._served, n=3)
        hint = (
            f"did you mean {' or '.join(suggestions)}?"
            if suggestions
            else f"it serves: {', '.join(self.names) or 'nothing'}"
        )
        error = UnknownFunction(f"{worker} serves no function {name!r}; {hint}", worker=worker)
        error.suggestions = tuple(suggestions)
        raise error

    def method_names(self, class_: type) -> list[str]:
        return list(self.methods_of(class_))

    def method(self, value: object, name: str, worker: str) -> ExposedFunction:
        """A method of an object that others may call, or calling it, as a function of the object."""
        class_: Any = type(value)
        served_name = f"{class_.__name__}.{name}"
        if name == "__call__" and callable(value):
            # A module is called so that its hooks run, but takes the arguments of its forward.
            like = class_.forward if isinstance(value, torch.nn.Module) else None
            return ExposedFunction(served_name, class_.__call__, like)
        # Looked up on the class: what an instance holds in its attributes is not for others to call.
        found = self.methods_of(class_).get(name)
        if found is None:
            raise UnknownFunction(
                f"{class_.__name__} on {worker} has no method {name!r} that others may call"
                f"{self._why_not(class_, name)}",
                worker=worker,
            )
        method: Callable[..., object] = getattr(class_, name)
        if isinstance(found, staticmethod | classmethod):
            return ExposedFunction(served_name, lambda _, *args, **kwargs: method(*args, **kwargs))
        return ExposedFunction(served_name, method)

    def _find_methods(self, class_: type) -> dict[str, object]:
        """The public methods that a class itself, or an exposed base of it, defines.

        A base that is not exposed may define anything: those of a module can replace its parameters by
        memory that was never written to, or make files.
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
        entry = _exposed.get(id(base))
        return base is class_ or base in self._classes or (entry is not None and entry.value is base)

    def _why_not(self, class_: type, name: str) -> str:
        base, value = _definitions(class_).get(name, (class_, None))
        if name.startswith("_") or not _is_method(value) or self._may_define(base, class_):
            return ""
        if _package(base) in ("torch", "builtins"):
            return ": it is not its own"
        return f": {base.__name__}, which defines it, is not exposed"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._served))

    def describe(self) -> list[describe_pb2.Function]:
        return [self._served[name].describe(self.methods_of) for name in self.names]

    def describe_types(self) -> list[describe_pb2.ExposedType]:
        return [
            describe_pb2.ExposedType(name=name, members=_members(type_), is_enum=issubclass(type_, enum.Enum))
            for name, type_ in self._type_names
        ]


def _not_callable(name: str, value: object) -> Callable[..., object]:
    def refuse(*_: object, **__: object) -> object:
        raise WrongArguments(f"{name} is a {type(value).__name__} and cannot be called; call its methods")

    return refuse


def _definitions(class_: type) -> dict[str, tuple[type, object]]:
    """For each name of a class, the base that it comes from, and what it is there."""
    found: dict[str, tuple[type, object]] = {}
    for base in class_.__mro__:
        for name, value in vars(base).items():
            found.setdefault(name, (base, value))
    return found


def _is_method(value: object) -> bool:
    """Whether it is a function written in Python, be it wrapped."""
    if isinstance(value, staticmethod | classmethod):
        return True
    return callable(value) and not inspect.isclass(value) and inspect.isfunction(inspect.unwrap(value))


def _package(class_: type) -> str:
    return class_.__module__.partition(".")[0]


def _describe_method(name: str, method: Any) -> describe_pb2.Function:
    function = method.__func__ if isinstance(method, staticmethod | classmethod) else method
    signature = _signature(function)
    if signature is not None and not isinstance(method, staticmethod):
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    described = _describe_callable(name, function, signature)
    described.kind = describe_pb2.Function.KIND_FUNCTION
    return described


def _members(type_: type) -> list[str]:
    if issubclass(type_, enum.Enum):
        return list(type_.__members__)
    if dataclasses.is_dataclass(type_):
        return [field.name for field in dataclasses.fields(type_)]
    return list(type_._fields)  # type: ignore[attr-defined]


def _signature(value: Callable[..., object]) -> inspect.Signature | None:
    try:
        return inspect.signature(value)
    except (ValueError, TypeError):
        return None  # a builtin that does not tell


def _describe_callable(
    name: str, value: object, signature: inspect.Signature | None
) -> describe_pb2.Function:
    described = describe_pb2.Function(name=name, doc=_doc(value))
    if signature is None:
        return described
    described.returns = _text(signature.return_annotation)
    for parameter in signature.parameters.values():
        described.parameters.append(
            describe_pb2.Parameter(
                name=parameter.name,
                kind=parameter.kind.value + 1,  # type: ignore[arg-type] # our kinds are inspect's, after 0
                annotation=_text(parameter.annotation),
                default=None if parameter.default is inspect.Parameter.empty else _repr(parameter.default),
            )
        )
    return described


def _doc(value: object) -> str:
    """The docstring. Of a class only its own: that of torch.nn.Module says nothing about it."""
    if inspect.isclass(value):
        return inspect.cleandoc(vars(value).get("__doc__") or "")
    return inspect.getdoc(value) or ""


def _text(annotation: object) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"<{type(value).__name__}>"
