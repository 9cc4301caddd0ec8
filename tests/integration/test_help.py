"""Pages of help: there at once, and whole in a narrow terminal."""

from __future__ import annotations

import fcntl
import inspect
import os
import re
import struct
import subprocess
import sys
import termios

import pytest
import typer
from tests.integration.daemons import DEADLINE

import gradwire.cli
import gradwire_server.daemon.cli
from gradwire.transport import LinkSettings
from gradwire_server.daemon import config
from gradwire_server.serving.limits import HoldLimits
from gradwire_server.worker import Worker

APPS = {"gradwire.cli": gradwire.cli.app, "gradwire_server.daemon.cli": gradwire_server.daemon.cli.app}
PAGES = [
    (module, command) for module, app in APPS.items() for command in ("", *typer.main.get_group(app).commands)
]
HEAVY = ("torch", "numpy", "grpc", "google.protobuf")
"""What takes long to load."""

RUN = """
import importlib, sys
sys.argv = sys.argv[1:]
try:
    importlib.import_module(sys.argv[0]).main()
except SystemExit as ended:
    assert ended.code == 0, ended.code
print("loaded:", *(name for name in {heavy} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [*PAGES, ("gradwire.cli", "--version"), ("gradwire_server.daemon.cli", "--version")],
)
def test_help_and_version_load_nothing_that_takes_long(module: str, command: str) -> None:
    words = [command] if command.startswith("--") else [*command.split(), "--help"]
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(heavy=HEAVY), module, *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert len(done.stdout.splitlines()) > 1


def in_terminal(columns: int, *command: str) -> str:
    """What a command writes to a terminal of that width."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdout=theirs, stdin=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    try:
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # how Linux tells that the other end was closed
                break
            written += piece
        assert process.wait(DEADLINE) == 0, written
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(("module", "command"), PAGES)
def test_a_terminal_of_80_columns_shows_every_option_whole(module: str, command: str) -> None:
    page = in_terminal(80, sys.executable, "-m", module, *command.split(), "--help")
    group = typer.main.get_group(APPS[module])
    shown = group.commands[command] if command else group
    flags = [flag for parameter in shown.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    assert flags
    for flag in flags:
        if flag.startswith("-"):
            assert re.search(rf"(?<![\w-]){flag}(?![\w-])", page), flag
    assert max(map(len, page.splitlines())) <= 80
    assert "…" not in page
    assert "..." not in page.replace("]...", "").replace("}...", "").replace("N,M,...", ""), (
        "something was cut"
    )


def test_sizes_are_shown_as_people_write_them() -> None:
    page = in_terminal(80, sys.executable, "-m", "gradwire_server.daemon.cli", "serve", "--help")
    assert not re.search(r"\d{8}", page)
    text = " ".join(page.split())
    for flag, size in (("--max-held-bytes", "1TiB"), ("--max-shared-bytes", "4GiB")):
        assert re.search(rf"{flag} SIZE [^\[]*\[default: {size}\]", text), flag


@pytest.mark.parametrize("size", [1, 1000, 1024, 64 << 20, 3 << 30, 1 << 40, (1 << 40) + 1])
def test_a_size_as_it_is_shown_is_taken_for_the_same(size: int) -> None:
    assert config.byte_size(config.shown_size(size)) == size


def test_the_command_line_has_the_defaults_of_the_worker() -> None:
    options = inspect.signature(gradwire_server.daemon.cli.serve).parameters
    worker = inspect.signature(Worker).parameters
    for name in options.keys() & worker.keys() - {"bind", "follow"}:
        assert options[name].default == worker[name].default, name
    assert options["max_bytes_in_flight_per_client"].default == LinkSettings.max_bytes_in_flight
    assert options["max_held_bytes"].default == HoldLimits.bytes


def test_a_health_check_does_not_load_torch() -> None:
    program = RUN.replace(".main()", '.main(["127.0.0.1:1"])').replace("ended.code == 0", "ended.code == 1")
    done = subprocess.run(
        [sys.executable, "-c", program.format(heavy=("torch", "numpy")), "gradwire_server.health"],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.stdout.splitlines()[-1] == "loaded:", done
