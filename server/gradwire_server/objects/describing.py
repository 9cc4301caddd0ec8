"""Descriptions of functions, classes and types, as a worker's Describe response lists them."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gradwire.proto.v1 import describe_pb2

__all__ = ["describe_callable", "describe_type", "signature_of"]

_LONGEST_DEFAULT = 200
"""A default value whose repr has more characters than this is shown as its type."""


def signature_of(value: Callable[..., object]) -> inspect.Signature | None:
    """The signature of a callable; None for builtins that have none."""
    try:
        return inspect.signature(value)
    except (ValueError, TypeError):
        return None


def describe_callable(
    name: str,
    value: object,
    signature: inspect.Signature | None,
    methods_of: Callable[[type], Mapping[str, object]],
) -> describe_pb2.Function:
    """Describes a function, or a class or an instance with its methods."""
    described = _describe_signature(name, value, signature)
    methods: Mapping[str, object] = {}
    if inspect.isclass(value):
        described.kind = describe_pb2.Function.KIND_CLASS
        methods = methods_of(value)
    elif inspect.isroutine(value):
        described.kind = describe_pb2.Function.KIND_FUNCTION
    else:
        described.kind = describe_pb2.Function.KIND_INSTANCE
        methods = methods_of(type(value))
    described.methods.extend(_describe_method(name, method) for name, method in methods.items())
    return described


def describe_type(name: str, type_: type) -> describe_pb2.ExposedType:
    """Describes a dataclass, named tuple or enum."""
    is_enum = issubclass(type_, enum.Enum)
    return describe_pb2.ExposedType(name=name, members=_members(type_), is_enum=is_enum)


def _members(type_: type) -> list[str]:
    if issubclass(type_, enum.Enum):
        return list(type_.__members__)
    if dataclasses.is_dataclass(type_):
        return [field.name for field in dataclasses.fields(type_)]
    return list(type_._fields)  # type: ignore[attr-defined]


def _describe_method(name: str, method: Any) -> describe_pb2.Function:
    function = method.__func__ if isinstance(method, staticmethod | classmethod) else method
    signature = signature_of(function)
    if signature is not None and not isinstance(method, staticmethod):
        # Without `self` or `cls`, which clients do not pass.
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    described = _describe_signature(name, function, signature)
    described.kind = describe_pb2.Function.KIND_FUNCTION
    return described


def _describe_signature(
    name: str, value: object, signature: inspect.Signature | None
) -> describe_pb2.Function:
    described = describe_pb2.Function(name=name, doc=_docstring(value))
    if signature is None:
        return described
    described.returns = _annotation_text(signature.return_annotation)
    for parameter in signature.parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        described.parameters.append(
            describe_pb2.Parameter(
                name=parameter.name,
                kind=parameter.kind.value + 1,  # type: ignore[arg-type] # our kinds are inspect's, after 0
                annotation=_annotation_text(parameter.annotation),
                default=_short_repr(parameter.default) if has_default else None,
            )
        )
    return described


def _docstring(value: object) -> str:
    """The docstring. Of a class only its own: a docstring that it inherits says nothing about it."""
    if inspect.isclass(value):
        return inspect.cleandoc(vars(value).get("__doc__") or "")
    return inspect.getdoc(value) or ""


def _annotation_text(annotation: object) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_DEFAULT else f"<{type(value).__name__}>"
