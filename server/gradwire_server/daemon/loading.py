"""Loads what the daemon is asked to serve: MODULE, or MODULE:OBJECT, from the working directory.

Whatever goes wrong in the user's module becomes one `LoadFailed` whose message says which module, what was
raised and at which line of which file: the daemon prints just that.
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
    """What `specs` name, in their order, without repetition. Raises `LoadFailed` or `NothingExposed`."""
    loaded: list[object] = []
    for spec in specs:
        served = load(spec)
        if not any(served is other for other in loaded):
            loaded.append(served)
    return loaded


def load(spec: str) -> object:
    """The module named by MODULE, which must expose something, or the object named by MODULE:OBJECT."""
    module_name, _, path = spec.partition(":")
    module = _import(module_name)
    served = _find(module, path) if path else module
    if isinstance(served, ModuleType):
        if not exposed_in(served):
            name = served.__name__
            raise NothingExposed(
                f"module '{name}' exposes nothing{_file_of(served)}: decorate what it should serve with "
                f"@gradwire_server.expose, or name an object, as in {name}:{_some_name(served)}"
            )
        return served

    if not callable(served):
        raise LoadFailed(
            f"'{spec}' is a {type(served).__name__}, which cannot be called and so not be served"
        )
    if not any(served is value for _, value in exposed_in(module)):
        # It is called what the user called it: lambdas and instances have no name of their own.
        try:
            expose_for(module.__name__, served, path.rpartition(".")[2])
        except ValueError as error:
            raise LoadFailed(f"'{spec}': {error}") from error
    return served


def load_instance(spec: str) -> Instance:
    """The object named by MODULE:OBJECT[=NAME], to be shared by that name or its own."""
    place, _, name = spec.partition("=")
    module_name, _, path = place.partition(":")
    value = _find(_import(module_name), path)
    if isinstance(value, type | ModuleType) or inspect.isroutine(value):
        raise LoadFailed(f"'{place}' is no instance but a {type(value).__name__}; serve it as {place}")
    try:
        return Instance(name or path.rpartition(".")[2], value)
    except ValueError as error:
        raise LoadFailed(f"'{spec}': {error}") from error


def _import(name: str) -> ModuleType:
    if "/" in name or name.startswith("."):
        # Python would take it for a relative import, and complain of something else.
        raise LoadFailed(f"no module named '{name}'{_hint(name)}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Missing is the module itself or a package that holds it, not something that it imports.
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise LoadFailed(f"no module named '{name}' in {os.getcwd()}{_hint(name)}") from error
        raise _failure(name, error) from error
    except (Exception, SystemExit) as error:
        # SystemExit: a script that was not written to be imported must not end the daemon without a word.
        raise _failure(name, error) from error


def _failure(name: str, error: BaseException) -> LoadFailed:
    kind = type(error).__name__
    # A SyntaxError's own text repeats the place; its `msg` is the reason alone.
    reason = (error.msg if isinstance(error, SyntaxError) else str(error)).strip()
    reason = " ".join(reason.split())
    place = _place(error)
    return LoadFailed(
        f"cannot import '{name}': {kind}{f': {reason}' if reason else ''}{f' ({place})' if place else ''}"
    )


def _place(error: BaseException) -> str:
    """FILE:LINE where the user should look: the innermost line of their own code, else the innermost."""
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
            # A property, or a module-level __getattr__, of the user's own.
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


def _some_name(module: ModuleType) -> str:
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if own and not name.startswith("_") and (inspect.isfunction(value) or inspect.isclass(value)):
            return name
    return "NAME"
