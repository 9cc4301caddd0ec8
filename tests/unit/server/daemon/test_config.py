"""Settings of the daemon: what each may be, and the config file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire_server.daemon import config
from gradwire_server.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        ("4096", 4096),
        ("64MB", 64_000_000),
        ("64 mb", 64_000_000),
        ("1GiB", 2**30),
        ("1.5KiB", 1536),
        ("9007199254740993B", 2**53 + 1),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert config.byte_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MB", "-1", "1XB", "0", "1 2", True, 1.5, None, "0.1B", "9" * 400 + ".5"]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match=r"size|byte"):
        config.byte_size(text)


@pytest.mark.parametrize(
    "address", ["0.0.0.0:0", "localhost:50051", "[::1]:1", "unix:worker.sock", "unix:///run/w"]
)
def test_addresses(address: str) -> None:
    assert config.bind_address(address) == address


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:x", "host:65536", "::1:1", "unix:", "host:-1", 5]
)
def test_what_is_no_address(address: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        config.bind_address(address)


@pytest.mark.parametrize("spec", ["", ":", "m:", ":f", "a:b:c"])
def test_what_is_no_module(spec: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        config.module_spec(spec)


@pytest.mark.parametrize("value", [True, "x", None, [1], "nan", -1, "inf"])
def test_what_is_no_time(value: object) -> None:
    with pytest.raises(ValueError, match="seconds"):
        config.seconds(value)


def test_a_file_with_every_setting(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(
        """
        [serve]
        modules = ["layers", "more:encode"]
        bind = "0.0.0.0:50051"
        name = "gpu-box"
        expose-instance = "layers:encoder = enc"
        threads = 8
        threads-per-client = 4
        torch-threads = 2
        lease = 60
        lost_after = 2.5
        grace = 0
        max-message-bytes = "1GiB"
        max-tensor-elements = 1_000_000
        max-queued-calls = 100
        max-queued-calls-per-client = 10
        max-bytes-in-flight = "64MB"
        max-bytes-in-flight-per-client = "32MB"
        max-contexts = 50
        max-contexts-per-client = 5
        max-objects = 60
        max-objects-per-client = 6
        max-held-bytes-per-client = "1GB"
        max-held-bytes = "2GB"
        health = true
        same-host = false
        direct = false
        direct-bind = "0.0.0.0:50052"
        follow = ["10.0.0.*:50051", "unix:/run/*"]
        tune-malloc = false
        max-shared-bytes = "1GiB"
        tls-cert = "/etc/gradwire/server.pem"
        tls-key = "/etc/gradwire/server-key.pem"
        tls_client_ca = "/etc/gradwire/clients.pem"
        tls-ca = "/etc/gradwire/ca.pem"
        reflection = false
        state-dir = "/var/lib/gradwire"
        save-every = 60
        log-level = "DEBUG"
        log-format = "json"
        """
    )
    settings = config.read_config(path)
    assert settings == {
        "modules": ["layers", "more:encode"],
        "bind": ["0.0.0.0:50051"],
        "name": "gpu-box",
        "expose_instance": ["layers:encoder=enc"],
        "threads": 8,
        "threads_per_client": 4,
        "torch_threads": 2,
        "lease": 60.0,
        "lost_after": 2.5,
        "grace": 0.0,
        "max_message_bytes": 2**30,
        "max_tensor_elements": 10**6,
        "max_queued_calls": 100,
        "max_queued_calls_per_client": 10,
        "max_bytes_in_flight": 64 * 10**6,
        "max_bytes_in_flight_per_client": 32 * 10**6,
        "max_contexts": 50,
        "max_contexts_per_client": 5,
        "max_objects": 60,
        "max_objects_per_client": 6,
        "max_held_bytes_per_client": 10**9,
        "max_held_bytes": 2 * 10**9,
        "health": True,
        "same_host": False,
        "direct": False,
        "direct_bind": "0.0.0.0:50052",
        "follow": ["10.0.0.*:50051", "unix:/run/*"],
        "tune_malloc": False,
        "max_shared_bytes": 1 << 30,
        "tls_cert": "/etc/gradwire/server.pem",
        "tls_key": "/etc/gradwire/server-key.pem",
        "tls_client_ca": "/etc/gradwire/clients.pem",
        "tls_ca": "/etc/gradwire/ca.pem",
        "reflection": False,
        "state_dir": "/var/lib/gradwire",
        "save_every": 60.0,
        "log_level": "debug",
        "log_format": "json",
    }
    assert settings.keys() == {setting.replace("-", "_") for setting in config.SETTINGS}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\nthred = 1", "unknown key 'thred' in [serve]; did you mean 'threads'"),
        ("threads = 1", "unknown key 'threads'; settings go into the table [serve]"),
        ("[server]\nthreads = 1", "unknown key 'server'; did you mean 'serve'?"),
        ("[serve]\nthreads = true", "'threads' in [serve]: True is not a whole number"),
        ("[serve]\nhealth = 'yes'", "'health' in [serve]: 'yes' is not true or false"),
        ("[serve]\nbind = []", "'bind' in [serve]: the list is empty"),
        ("[serve]\nlost-after = 1\nlost_after = 2", "'lost-after' is given twice"),
        ("serve = 1", "must be a table"),
        ("[serve", "is not TOML"),
        ("[serve]\nthreads = " + "9" * 5000, "is not TOML"),
        ("[serve]\nbind = " + "[" * 5000, "is not TOML"),
        ("[serve]\nlease = " + "9" * 400, "is not a number of seconds"),
        ("[serve]\nmax-message-bytes = '" + "9" * 400 + ".5GB'", "is beyond all sizes"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        config.read_config(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)
    assert raised.value.exit_code == 6


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        config.read_config(tmp_path / "none.toml")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        config.read_config(path)
