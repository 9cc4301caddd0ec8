"""The version of the distribution, and what its native module was built with."""

import importlib.machinery
import importlib.util
from pathlib import Path

__version__ = "0.1.0"


def description(command: str) -> str:
    """What a command prints for ``--version``."""
    return f"{command} {__version__}\nnative module: {_compiler()}"


def _compiler() -> str:
    # By its file: importing it by its name imports its package first, which takes long.
    folder = Path(__file__).with_name("transport")
    spec = importlib.machinery.PathFinder.find_spec("native", [str(folder)])
    if spec is None or spec.loader is None:
        return "missing; `make native` compiles it"
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return f"compiled with {native.compiler}"
