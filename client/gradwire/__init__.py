"""gradwire: call functions and modules in other processes, and backpropagate through the calls.

>>> import gradwire as gw
>>> worker = gw.connect("gpu-box:50051")        # doctest: +SKIP
>>> worker.encode(torch.ones(3))                # doctest: +SKIP
"""

# ruff: noqa: F405 - names that come with the star

import importlib as _importlib
import typing as _typing

from gradwire import errors
from gradwire._version import __version__
from gradwire.errors import *  # noqa: F403 - the whole tree is public

if _typing.TYPE_CHECKING:
    from gradwire import nn, optim
    from gradwire._public import *  # noqa: F403 - every name in it is public
else:

    def __getattr__(name: str) -> object:
        """Imports everything, torch included, when a public name is first used: `gradwire --help` uses
        none."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = _importlib.import_module("gradwire._public")
        missing = [each for each in __all__ if each not in globals()]
        globals().update({each: getattr(public, each) for each in missing})
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "CallFuture",
    "CodecReport",
    "CodecRow",
    "Compression",
    "Context",
    "FunctionInfo",
    "GradcheckReport",
    "GradcheckRow",
    "Keywords",
    "LoadedKeys",
    "RemoteFunction",
    "RemoteRef",
    "RemoteWorker",
    "Tls",
    "Traffic",
    "__version__",
    "caller",
    "cancelled",
    "codec_error",
    "compression",
    "connect",
    "context",
    "current_context",
    "deadline",
    "errors",
    "gradcheck",
    "load",
    "nn",
    "optim",
    "register_type",
    "save",
    "timeout",
    "tune_malloc",
    *errors.__all__,
]
