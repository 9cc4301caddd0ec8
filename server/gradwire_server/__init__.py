"""The worker: a daemon, or a part of any program, that serves functions to gradwire's clients."""

from gradwire_server.errors import (
    BindFailed,
    ConfigError,
    DaemonError,
    LoadFailed,
    NothingExposed,
    StateError,
)
from gradwire_server.registry import expose
from gradwire_server.worker import Worker

__all__ = [
    "BindFailed",
    "ConfigError",
    "DaemonError",
    "LoadFailed",
    "NothingExposed",
    "StateError",
    "Worker",
    "expose",
]
