"""The worker, as a daemon or inside any program: serves functions, classes and modules to gradwire's
clients."""

import importlib as _importlib
import typing as _typing

from gradwire_server.errors import (
    BindFailed,
    CertificateError,
    ConfigError,
    DaemonError,
    LoadFailed,
    NothingExposed,
    StateError,
)

if _typing.TYPE_CHECKING:
    from gradwire_server.objects.exposing import expose
    from gradwire_server.worker import Worker
else:
    _LOADED_WHEN_USED = {"Worker": "gradwire_server.worker", "expose": "gradwire_server.objects.exposing"}

    def __getattr__(name: str) -> object:
        """Imports the names that need torch when they are first used: `gradwire-server --help` uses none of
        them."""
        if name not in _LOADED_WHEN_USED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_importlib.import_module(_LOADED_WHEN_USED[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "BindFailed",
    "CertificateError",
    "ConfigError",
    "DaemonError",
    "LoadFailed",
    "NothingExposed",
    "StateError",
    "Worker",
    "expose",
]
