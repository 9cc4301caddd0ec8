"""Errors that keep a worker from serving.

::

    GradwireError
    └── DaemonError                 exit code of the daemon
        ├── BindFailed              3   an address cannot be listened on
        ├── LoadFailed              4   a module or object cannot be loaded
        ├── NothingExposed          5   there is nothing to serve
        ├── ConfigError             6   the config file cannot be used
        ├── StateError              7   the state directory cannot be used
        └── CertificateError        8   a certificate, key or CA file cannot be used

The daemon prints the message of such an error as one line and exits with its `exit_code`. Usage errors exit
with 2.
"""

from __future__ import annotations

from gradwire.errors import GradwireError

__all__ = [
    "BindFailed",
    "CertificateError",
    "ConfigError",
    "DaemonError",
    "LoadFailed",
    "NothingExposed",
    "StateError",
]


class DaemonError(GradwireError):
    """A worker cannot serve."""

    exit_code: int = 1
    """The exit code of the daemon."""


class BindFailed(DaemonError):
    """An address cannot be listened on: it is in use, not this machine's, or not permitted."""

    exit_code = 3

    def __init__(self, message: str, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class LoadFailed(DaemonError):
    """A module does not exist, raised while it was imported, or lacks the object that is to be served."""

    exit_code = 4


class NothingExposed(DaemonError):
    """The modules to serve expose nothing."""

    exit_code = 5


class ConfigError(DaemonError):
    """The config file does not exist, is no TOML, or has an unknown key or a wrong value."""

    exit_code = 6


class StateError(DaemonError):
    """The state directory is in use, damaged or not writable, or was saved by a worker that served other
    modules.

    When a worker stops: its last save failed. The save before that is unharmed.
    """

    exit_code = 7


class CertificateError(DaemonError):
    """A certificate, key or CA file cannot be read or used, or one is missing that belongs to another.

    Only when a worker starts: one that runs keeps the last good certificates.
    """

    exit_code = 8
