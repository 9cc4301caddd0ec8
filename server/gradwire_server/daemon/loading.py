"""Loads the modules and objects to serve, MODULE or MODULE:OBJECT, from the working directory.

Every error in the user's module becomes a `LoadFailed` whose message names the module, the exception, and the
line of the file that raised it. The daemon prints just that message.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from gradwire_server.errors import LoadFailed, NothingExposed
from gradwire_server.objects.exposing import Instance, expose_for, exposed_in

__all__ = ["load", "load_all", "load_instance", "use_working_directory"]


def use_working_directory() -> None:
    """Makes modules of the working directory importable, before any installed module of the same name."""
    # A console script has its own folder at sys.path[0], `python -m` the working directory.
    directory = os.getcwd()
    if sys.path[:1] != [directory]:
        sys.path.insert(0, directory)
    # The directory may hold files that were written after Python last listed it.
    importlib.invalidate_caches()


def load_all(specs: Iterable[str]) -> list[object]:
    """The modules and objects that `specs` name, in their order, each once. Raises `LoadFailed` or
    `NothingExposed`."""
    loaded: list[object] = []
    for spec in specs:
        value = load(spec)
        if not any(value is other for other in loaded):
            loaded.append(value)
    return loaded


def load(spec: str) -> object:
    """The module named by MODULE, which must expose something, or the object named by MODULE:OBJECT."""
    module_name, _, path = spec.partition(":")
    module = _import(module_name)
    value = _find(module, path) if path else module
    if isinstance(value, ModuleType):
        if not exposed_in(value):
            name = value.__name__
            raise NothingExposed(
                f"module '{name}' exposes nothing{_file_of(value)}: decorate what it should serve with "
                f"@gradwire_server.expose, or name an object, as in {name}:{_example_name(value)}"
            )
        return value

    if not callable(value):
        raise LoadFailed(
            f"'{spec}' is a {type(value).__name__}, which cannot be called, so it cannot be served"
        )
    if not any(value is exposed for _, exposed in exposed_in(module)):
        # Exposed under the name in the spec, because lambdas and instances have no name of their own.
        try:
            expose_for(module.__name__, value, path.rpartition(".")[2])
        except ValueError as error:
            raise LoadFailed(f"'{spec}': {error}") from error
    return value


def load_instance(spec: str) -> Instance:
    """The object named by MODULE:OBJECT[=NAME], to be shared under NAME, or else under its own name."""
    target, _, name = spec.partition("=")
    module_name, _, path = target.partition(":")
    value = _find(_import(module_name), path)
    if isinstance(value, type | ModuleType) or inspect.isroutine(value):
        raise LoadFailed(f"'{target}' is no instance but a {type(value).__name__}; serve it as {target}")
    try:
        return Instance(name or path.rpartition(".")[2], value)
    except ValueError as error:
        raise LoadFailed(f"'{spec}': {error}") from error


def _import(name: str) -> ModuleType:
    if "/" in name or name.startswith("."):
        # Python would take it for a relative import, and its error would not help.
        raise LoadFailed(f"no module named '{name}'{_hint(name)}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself or a package that contains it is missing, rather than a module that it imports.
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise LoadFailed(f"no module named '{name}' in {os.getcwd()}{_hint(name)}") from error
        raise _failure(name, error) from error
    except (Exception, SystemExit) as error:
        # SystemExit, too: a script that was not written to be imported must not end the daemon silently.
        raise _failure(name, error) from error


def _failure(name: str, error: BaseException) -> LoadFailed:
    kind = type(error).__name__
    # The text of a SyntaxError repeats the file and line; its `msg` is the reason alone.
    reason = (error.msg if isinstance(error, SyntaxError) else str(error)).strip()
    reason = " ".join(reason.split())
    location = _location(error)
    where = f" ({location})" if location else ""
    return LoadFailed(f"cannot import '{name}': {kind}{f': {reason}' if reason else ''}{where}")


def _location(error: BaseException) -> str:
    """FILE:LINE of the innermost line in the user's own code, or else of the innermost line at all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_relative(error.filename)}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, importlib.__file__)
    ]
    if not frames:
        return ""
    own = [frame for frame in frames if _is_own(frame.filename)]
    frame = (own or frames)[-1]
    return f"{_relative(frame.filename)}:{frame.lineno}"


def _is_own(filename: str) -> bool:
    path = Path(filename)
    return path.is_relative_to(os.getcwd()) and "site-packages" not in path.parts


def _relative(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(os.getcwd())) if path.is_relative_to(os.getcwd()) else filename


def _find(module: ModuleType, path: str) -> object:
    found: object = module
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            known = [name for name in dir(found) if not name.startswith("_")]
            matches = difflib.get_close_matches(part, known, n=3)
            hint = f"; did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""
            raise LoadFailed(
                f"module '{module.__name__}' has no object '{path}'{_file_of(module)}{hint}"
            ) from error
        except Exception as error:
            # Raised by a property or a module-level __getattr__ of the user's.
            raise _failure(f"{module.__name__}:{path}", error) from error
    return found


def _hint(name: str) -> str:
    directory = Path(os.getcwd())
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        return f"; give the module's name, as in '{module}', not its file"
    here = [path.stem for path in directory.glob("*.py")]
    here += [path.parent.name for path in directory.glob("*/__init__.py")]
    matches = difflib.get_close_matches(name, here, n=3)
    return f"; did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def _file_of(module: ModuleType) -> str:
    filename = getattr(module, "__file__", None)
    return f" ({_relative(filename)})" if filename else ""


def _example_name(module: ModuleType) -> str:
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if own and not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
            return name
    return "NAME"
