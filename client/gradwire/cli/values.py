"""Words of the command line -> arguments of a call, and results -> JSON."""

from __future__ import annotations

import ast
import base64
import dataclasses
import enum
import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

__all__ = ["parse_arguments", "parse_value", "to_json"]

_KEYWORD = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)
_TENSOR = re.compile(r"t:(?:(?P<dtype>[a-z][a-z0-9_]*):)?(?P<data>.*)", re.DOTALL)


def parse_arguments(words: Sequence[str]) -> tuple[list[object], dict[str, object]]:
    """Positional and keyword arguments from words of the command line. Raises ValueError."""
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for word in words:
        keyword = _KEYWORD.fullmatch(word)
        if keyword is None:
            if kwargs:
                raise ValueError(f"{word!r} comes after keyword arguments; positional arguments come first")
            args.append(parse_value(word))
        elif keyword[1] in kwargs:
            raise ValueError(f"the keyword argument {keyword[1]!r} is given twice")
        else:
            kwargs[keyword[1]] = parse_value(keyword[2])
    return args, kwargs


def parse_value(word: str) -> object:
    """The value of a word: a tensor after the prefix ``t:``, else JSON, else a Python literal, else the word
    itself."""
    tensor = _TENSOR.fullmatch(word)
    if tensor is not None:
        return _tensor(word, tensor["data"], tensor["dtype"])
    found, value = _literal(word)
    if found:
        return value
    if word[:1] in ("[", "{", "(", '"', "'"):
        # The word is a literal with a mistake. Passed as a string, it would fail far from the mistake.
        raise ValueError(f"{word!r} is neither JSON nor a Python literal; quote it twice for a string")
    if word.startswith("-"):
        raise ValueError(f"no such option: {word}; for a string that begins with a dash write '\"{word}\"'")
    return word


def _literal(word: str) -> tuple[bool, object]:
    try:
        return True, json.loads(word)
    except (ValueError, RecursionError):
        pass
    try:
        return True, ast.literal_eval(word.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False, None


def _tensor(word: str, data: str, dtype_name: str | None) -> torch.Tensor:
    dtype = None
    if dtype_name is not None:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{word!r}: {dtype_name!r} is not a dtype of torch")
    found, value = _literal(data)
    if not found:
        raise ValueError(f"{word!r}: after t: comes a number or a nested list of numbers")
    try:
        return torch.tensor(value, dtype=dtype)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{word!r} is not a tensor: {error}") from None


def to_json(value: object) -> Any:
    """A value as JSON. `gradwire call --help` says how values are written that JSON does not have."""
    match value:
        case None | bool() | str():
            return value
        case enum.Enum():
            return to_json(value.value)
        case int():
            return value
        case float():
            return value if math.isfinite(value) else _non_finite(value)
        case bytes() | bytearray():
            return base64.b64encode(value).decode("ascii")
        case torch.Tensor():
            return to_json(_dense(value).tolist())
        case np.ndarray() | np.generic():
            return to_json(value.tolist())
        case Mapping():
            return {key if isinstance(key, str) else str(key): to_json(item) for key, item in value.items()}
        case Sequence() | Set():
            return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def _non_finite(value: float) -> str:
    # The names that protobuf's JSON uses. A bare NaN is not valid JSON.
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()
