"""The functions and classes that a worker serves, as Python signatures."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import describe_pb2

__all__ = ["FunctionInfo", "function_info"]

_KINDS = {
    describe_pb2.Function.KIND_FUNCTION: "function",
    describe_pb2.Function.KIND_CLASS: "class",
    describe_pb2.Function.KIND_INSTANCE: "instance",
}


class _Text:
    """An annotation or a default value; only its text is known here, and `repr` shows it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    """A function, a class or a shared instance that a worker serves."""

    name: str
    kind: str
    """"function", "class" or "instance"."""
    doc: str
    signature: inspect.Signature
    """Annotations and defaults are text: their values live on the worker."""
    methods: Mapping[str, FunctionInfo] = field(default_factory=dict)
    """The methods of a class or an instance that can be called, by name."""

    def __str__(self) -> str:
        return f"{self.name}{self.signature}"


def function_info(message: describe_pb2.Function) -> FunctionInfo:
    """The `FunctionInfo` of one entry of a worker's description.

    Raises MalformedMessage for a signature that Python does not have."""
    return FunctionInfo(
        name=message.name,
        kind=_KINDS.get(message.kind, "function"),
        doc=message.doc,
        signature=_checked_signature(message),
        methods={method.name: function_info(method) for method in message.methods},
    )


def _checked_signature(message: describe_pb2.Function) -> inspect.Signature:
    try:
        return _signature(message)
    except (ValueError, IndexError) as error:  # IndexError: of a parameter without a name, by Python 3.11
        raise MalformedMessage(f"{message.name!r} is described with no valid signature: {error}") from error


def _signature(message: describe_pb2.Function) -> inspect.Signature:
    empty: Any = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            parameter.name,
            inspect._ParameterKind(parameter.kind - 1),
            default=_Text(parameter.default) if parameter.HasField("default") else empty,
            annotation=_Text(parameter.annotation) if parameter.annotation else empty,
        )
        for parameter in message.parameters
    ]
    return inspect.Signature(
        parameters, return_annotation=_Text(message.returns) if message.returns else empty
    )
