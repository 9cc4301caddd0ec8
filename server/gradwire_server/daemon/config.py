"""The daemon's settings: what each value may be, and the TOML file that may hold them.

A setting has one name everywhere. `lost-after` is the flag ``--lost-after``, the environment variable
``GRADWIRE_LOST_AFTER`` and the key ``lost-after`` of the table ``[serve]`` in the config file. The first of
these that is given wins; `gradwire_server.daemon.cli` combines them.

The checks here take a value in its own type or as text, and raise `ValueError` with what is wrong about it,
so that the same rules apply to flags, variables and the file.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gradwire_server.errors import ConfigError

__all__ = [
    "LOG_FORMATS",
    "LOG_LEVELS",
    "SETTINGS",
    "bind_address",
    "byte_size",
    "environment_variable",
    "file_path",
    "instance_spec",
    "log_format",
    "log_level",
    "module_spec",
    "positive_integer",
    "positive_seconds",
    "read_config",
    "seconds",
    "shown_size",
    "worker_name",
]

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "text", "json")

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text")
    return value.strip()


def _choice(value: object, choices: tuple[str, ...]) -> str:
    text = _text(value).lower()
    if text not in choices:
        raise ValueError(f"{value!r} is not one of {', '.join(choices)}")
    return text


def worker_name(value: object) -> str:
    """A name of one line, without spaces around it."""
    name = _text(value)
    if not name.isprintable():
        raise ValueError(f"{value!r} has characters that cannot be printed")
    return name


def module_spec(value: object) -> str:
    """MODULE or MODULE:OBJECT."""
    spec = _text(value)
    module, colon, path = spec.partition(":")
    if not module or (colon and not path) or ":" in path:
        raise ValueError(f"{spec!r} is not of the form MODULE or MODULE:OBJECT")
    return spec


def instance_spec(value: object) -> str:
    """MODULE:OBJECT or MODULE:OBJECT=NAME."""
    spec = _text(value)
    place, equals, name = (part.strip() for part in spec.partition("="))
    if ":" not in place or (equals and not name):
        raise ValueError(f"{spec!r} is not of the form MODULE:OBJECT or MODULE:OBJECT=NAME")
    return f"{module_spec(place)}={name}" if name else module_spec(place)


def bind_address(value: object) -> str:
    """HOST:PORT, [IPV6]:PORT or unix:PATH."""
    address = _text(value)
    if address.startswith("unix:"):
        if address == "unix:":
            raise ValueError("'unix:' needs a path, as in unix:/run/worker.sock")
        return address
    host, _, port = address.rpartition(":")
    if not host or not port:
        raise ValueError(f"{address!r} is not of the form HOST:PORT or unix:PATH")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{address!r}: an IPv6 address is written in brackets, as in [::1]:50051")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"{address!r}: the port must be a number from 0 to 65535, not {port!r}")
    return address


def address_pattern(value: object) -> str:
    """An address with * for any part of it."""
    pattern = _text(value)
    if ":" not in pattern:
        raise ValueError(f"{pattern!r} is not of the form HOST:PORT or unix:PATH, such as 10.0.0.*:50051")
    return pattern


def positive_integer(value: object) -> int:
    """A whole number from 1 on."""
    # bool is an int to Python, but `threads = true` in a file is a mistake.
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a whole number")
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None
    if number < 1:
        raise ValueError(f"must be at least 1, not {number}")
    return number


def seconds(value: object) -> float:
    """A number of seconds from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a number of seconds")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a number of seconds") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"must be a finite number of seconds from 0 on, not {value}")
    return number


def positive_seconds(value: object) -> float:
    """A number of seconds greater than 0."""
    number = seconds(value)
    if number == 0:
        raise ValueError("must be more than 0 seconds")
    return number


def byte_size(value: object) -> int:
    """A number of bytes: 67108864, "64MiB", "64MB", "1.5 GB". The units with an i are powers of 1024."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size")
    match = _SIZE.fullmatch(str(value).strip())
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{value!r} is not a size; write bytes or a unit, as in 64MB or 1GiB")
    # Whole numbers stay exact beyond 2**53.
    number = match["number"]
    try:
        size = int(number) * unit if number.isdigit() else round(float(number) * unit)
    except OverflowError:
        raise ValueError(f"{value!r} is beyond all sizes") from None
    if size < 1:
        raise ValueError("must be at least 1 byte")
    return size


def shown_size(size: int) -> str:
    """A number of bytes with the largest unit that divides it, as `byte_size` accepts it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size % _UNITS[unit.lower()] == 0:
            return f"{size // _UNITS[unit.lower()]}{unit}"
    return str(size)


def file_path(value: object) -> str:
    """A path, with ~ for the home directory."""
    return os.path.expanduser(_text(value))


def log_level(value: object) -> str:
    """One of `LOG_LEVELS`."""
    return _choice(value, LOG_LEVELS)


def log_format(value: object) -> str:
    """One of `LOG_FORMATS`."""
    return _choice(value, LOG_FORMATS)


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def _one_or_more(check: Callable[[object], str]) -> Callable[[object], list[str]]:
    def checked(value: object) -> list[str]:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError("the list is empty")
        return [check(item) for item in values]

    return checked


SETTINGS: Mapping[str, Callable[[object], object]] = {
    "modules": _one_or_more(module_spec),
    "expose-instance": _one_or_more(instance_spec),
    "bind": _one_or_more(bind_address),
    "name": worker_name,
    "threads": positive_integer,
    "threads-per-client": positive_integer,
    "max-queued-calls": positive_integer,
    "max-queued-calls-per-client": positive_integer,
    "max-bytes-in-flight": byte_size,
    "max-bytes-in-flight-per-client": byte_size,
    "max-contexts": positive_integer,
    "max-contexts-per-client": positive_integer,
    "max-objects": positive_integer,
    "max-objects-per-client": positive_integer,
    "max-held-bytes-per-client": byte_size,
    "max-held-bytes": byte_size,
    "torch-threads": positive_integer,
    "lease": positive_seconds,
    "lost-after": positive_seconds,
    "grace": seconds,
    "max-message-bytes": byte_size,
    "max-tensor-elements": positive_integer,
    "health": _switch,
    "reflection": _switch,
    "same-host": _switch,
    "direct": _switch,
    "direct-bind": _text,
    "follow": _one_or_more(address_pattern),
    "max-shared-bytes": byte_size,
    "tls-cert": file_path,
    "tls-key": file_path,
    "tls-client-ca": file_path,
    "tls-ca": file_path,
    "tune-malloc": _switch,
    "state-dir": file_path,
    "save-every": positive_seconds,
    "log-level": log_level,
    "log-format": log_format,
}
"""Every setting that a config file may hold, with the check of its value."""


def environment_variable(setting: str) -> str:
    """The environment variable that holds a setting: GRADWIRE_LOST_AFTER for `lost-after`."""
    return "GRADWIRE_" + setting.upper().replace("-", "_")


def read_config(path: Path) -> dict[str, object]:
    """The settings in the table ``[serve]`` of a TOML file, checked, by the names of `serve`'s parameters."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        # ValueError: also of a number with too many digits. RecursionError: of arrays within arrays.
        raise ConfigError(f"config file {path} is not TOML: {error}") from error

    for table in document:
        if table != "serve":
            hint = (
                "; settings go into the table [serve]" if table in SETTINGS else _suggestion(table, ["serve"])
            )
            raise ConfigError(f"config file {path}: unknown key {table!r}{hint}")
    serve = document.get("serve", {})
    if not isinstance(serve, dict):
        raise ConfigError(f"config file {path}: 'serve' must be a table, [serve]")

    settings: dict[str, object] = {}
    for key, value in serve.items():
        # lost_after is accepted for lost-after, because both spellings are common in TOML.
        setting = key.replace("_", "-")
        check = SETTINGS.get(setting)
        if check is None:
            raise ConfigError(
                f"config file {path}: unknown key {key!r} in [serve]{_suggestion(setting, SETTINGS)}"
            )
        parameter = setting.replace("-", "_")
        if parameter in settings:
            raise ConfigError(f"config file {path}: {setting!r} is given twice in [serve]")
        try:
            settings[parameter] = check(value)
        except ValueError as error:
            raise ConfigError(f"config file {path}: {key!r} in [serve]: {error}") from error
    return settings


def _suggestion(name: str, known: Iterable[str]) -> str:
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if matches:
        return f"; did you mean {' or '.join(repr(match) for match in matches)}?"
    return f"; known: {', '.join(known)}"
