"""The TOML file with a daemon's settings."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.fuzz.inputs import Input
from tests.fuzz.target import Target

from gradwire_server.daemon.config import LOG_FORMATS, LOG_LEVELS, SETTINGS, read_config
from gradwire_server.errors import ConfigError

__all__ = ["Config"]

_FILE = b"""\
[serve]
modules = ["model", "package.module:Class"]
expose-instance = "model:encoder=encoder"
bind = ["127.0.0.1:50051", "[::1]:0", "unix:/tmp/socket"]
name = "worker"
threads = 4
max-bytes-in-flight = "1.5 GB"
max-message-bytes = 67_108_864
max-held-bytes = "64MiB"
lease = 30.0
grace = 0
health = true
direct-bind = "0.0.0.0:0"
state-dir = "~/state"
save-every = 1e1
log-level = "info"
log_format = 'json'
"""


class Config(Target):
    name = "config"
    refuses = (ConfigError,)
    words = (
        *SETTINGS,
        *LOG_LEVELS,
        *LOG_FORMATS,
        *(
            "[serve]",
            "[[serve]]",
            " = ",
            '"',
            "'''",
            '"""',
            "1e400",
            "nan",
            "inf",
            "9" * 5000,
            "0x" + "f" * 400,
        ),
        *(
            "9" * 400 + ".5 TiB",
            "1979-05-27T07:32:00Z",
            "[" * 3000,
            "{a=" * 3000,
            "a." * 3000,
            "\\u0000",
            "~x",
        ),
    )

    def corpus(self) -> dict[str, Input]:
        return {"all": (_FILE,), **{key: (f"[serve]\n{key} = 1\n".encode(),) for key in ("lease", "threads")}}

    def run(self, parts: Input) -> object:
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            file.write(parts[0])
            file.flush()
            return read_config(Path(file.name))
