"""``gradwire-server serve`` as a process: settings, exit codes, signals and the log."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE, Daemon, run, server_command

import gradwire
from gradwire.transport import native

GREET = """
    import gradwire_server as gws

    @gws.expose
    def greet(who: str) -> str:
        return f"hello {who}"

    def hidden() -> str:
        return "seen"
"""

# Says in the log that it runs, then waits until the test opens the other end of the pipe.
HOLD = """
    import logging
    import gradwire_server as gws

    @gws.expose
    def hold(path: str) -> str:
        logging.getLogger("test").info("holding")
        with open(path) as pipe:
            return pipe.read()
"""


def holding(line: dict[str, object]) -> bool:
    return line.get("message") == "holding"


def serve(folder: Path, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run("gradwire_server.daemon.cli", "serve", *args, cwd=folder, env=env)


def one_error_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("gradwire-server: error: ")
    return lines[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "greeting.py").write_text("import gradwire_server as gws\n@gws.expose\ndef greet(): ...\n")
    return tmp_path


# -- exit codes


def test_version() -> None:
    done = subprocess.run(server_command("--version"), capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0
    compiled = f"native module: compiled with {native.compiler}"
    assert done.stdout.splitlines() == [f"gradwire-server {gradwire.__version__}", compiled]


def test_busy_port_exits_with_3(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = serve(folder, "greeting", "--bind", address)
    assert done.returncode == 3
    assert address in one_error_line(done)
    assert "in use" in done.stderr


def test_a_module_that_fails_to_import_exits_with_4(folder: Path) -> None:
    (folder / "broken.py").write_text("import os\n\nvalue = 1 / 0\n")
    done = serve(folder, "broken")
    assert done.returncode == 4
    line = one_error_line(done)
    assert "'broken'" in line
    assert "ZeroDivisionError: division by zero" in line
    assert "broken.py:3" in line


def test_a_module_that_exposes_nothing_exits_with_5(folder: Path) -> None:
    (folder / "empty.py").write_text("def f(): ...\n")
    done = serve(folder, "empty")
    assert done.returncode == 5
    assert "'empty' exposes nothing" in one_error_line(done)


def test_an_unknown_key_in_the_config_file_exits_with_6(folder: Path) -> None:
    (folder / "worker.toml").write_text("[serve]\nthread = 3\n")
    done = serve(folder, "greeting", "--config", "worker.toml")
    assert done.returncode == 6
    line = one_error_line(done)
    assert "'thread'" in line
    assert "'threads'" in line


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        ([], {}, "Missing argument"),
        (["greeting", "--threads", "0"], {}, "at least 1"),
        (["greeting"], {"GRADWIRE_BIND": "nonsense"}, "HOST:PORT"),
        (["greeting", "--thread", "1"], {}, "No such option"),
    ],
)
def test_wrong_usage_exits_with_2(folder: Path, args: list[str], env: dict[str, str], said: str) -> None:
    done = serve(folder, *args, env=env)
    assert done.returncode == 2
    assert said in done.stderr


# -- settings


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(launch: Launch, tmp_path: Path) -> None:
    config = tmp_path / "worker.toml"
    config.write_text('[serve]\nname = "file"\ngrace = 7\nbind = ["127.0.0.1:0", "unix:file.sock"]\n')
    daemon = launch(
        GREET,
        *("--config", str(config), "--name", "flag"),
        bind=None,
        env={"GRADWIRE_NAME": "variable", "GRADWIRE_GRACE": "5"},
    )
    assert daemon.ready["worker"] == "flag"
    assert daemon.ready["addresses"][1] == "unix:file.sock"
    daemon.signal(signal.SIGTERM)
    assert "for 5 s" in daemon.wait_for("draining")["message"]


def test_everything_can_come_from_variables(tmp_path: Path) -> None:
    (tmp_path / "greeting.py").write_text("def plain(x): return x\n")
    daemon = Daemon(
        [],
        cwd=tmp_path,
        env={
            "GRADWIRE_MODULES": "greeting:plain",
            "GRADWIRE_BIND": "127.0.0.1:0 unix:worker.sock",
            "GRADWIRE_MAX_MESSAGE_BYTES": "64MB",
            "GRADWIRE_HEALTH": "false",
            "GRADWIRE_TORCH_THREADS": "1",
        },
    )
    try:
        daemon.wait_until_ready()
        assert daemon.ready["functions"] == ["plain"]
        assert len(daemon.ready["addresses"]) == 2
        assert daemon.ready["addresses"][1] == "unix:worker.sock"
    finally:
        daemon.stop()


def test_an_object_is_served_though_it_is_not_exposed(launch: Launch) -> None:
    daemon = launch(GREET, "served:hidden")
    assert daemon.ready["functions"] == ["greet", "hidden"]
    with gradwire.connect(daemon.address) as worker:
        assert worker.hidden() == "seen"


def test_a_unix_socket_is_served(launch: Launch, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/worker.sock"
    daemon = launch(GREET, bind=address)
    assert daemon.ready["addresses"] == [address]
    with gradwire.connect(address) as worker:
        assert worker.greet("socket") == "hello socket"


# -- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_call_in_flight_finishes_after_the_signal(
    launch: Launch, tmp_path: Path, number: signal.Signals
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    daemon = launch(HOLD, "--grace", str(DEADLINE))
    with gradwire.connect(daemon.address) as worker:
        future = worker.call_async("hold", str(pipe))
        daemon.wait_for(holding)
        daemon.signal(number)
        daemon.wait_for("draining")
        assert not future.done()
        pipe.write_text("finished")
        assert future.result(DEADLINE) == "finished"
    assert daemon.wait() == 0
    events = [line["event"] for line in daemon.lines if "event" in line]
    assert events == ["ready", "draining", "stopped"]


def test_a_call_that_outlives_the_grace_does_not_keep_the_daemon(launch: Launch, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    daemon = launch(HOLD, "--grace", "0.1")
    with gradwire.connect(daemon.address) as worker:
        future = worker.call_async("hold", str(pipe))
        daemon.wait_for(holding)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        future.cancel()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_it_at_once(
    launch: Launch, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    daemon = launch(HOLD, "--grace", "3600")
    with gradwire.connect(daemon.address) as worker:
        future = worker.call_async("hold", str(pipe))
        daemon.wait_for(holding)
        daemon.signal(number)
        daemon.wait_for("draining")
        daemon.signal(number)
        assert daemon.wait() == code
        future.cancel()


def test_a_signal_while_modules_load_ends_it_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "slow.py").write_text('import logging\nlogging.info("loading")\nopen("pipe").read()\n')
    daemon = Daemon(["slow"], cwd=tmp_path)
    try:
        daemon.wait_for(lambda line: line.get("message") == "loading")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    finally:
        daemon.stop()


# -- the log


def test_every_line_of_the_log_is_json_and_exceptions_of_threads_are_among_them(launch: Launch) -> None:
    daemon = launch(
        """
        import threading
        import warnings
        import gradwire_server as gws

        @gws.expose
        def fail_elsewhere() -> None:
            warnings.warn("careful")
            thread = threading.Thread(target=lambda: 1 / 0, name="elsewhere")
            thread.start()
            thread.join()
        """
    )
    with gradwire.connect(daemon.address) as worker:
        worker.fail_elsewhere()
    line = daemon.wait_for(lambda line: "exception" in line)
    assert line["thread_name"] == "elsewhere"
    assert "ZeroDivisionError" in line["exception"]
    daemon.wait_for(lambda line: "careful" in line.get("message", ""))
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    for line in daemon.lines:
        assert {"time", "level", "logger", "message"} <= line.keys(), line


def test_the_log_is_readable_lines_on_a_terminal(folder: Path) -> None:
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        server_command("serve", "greeting", "--bind", "127.0.0.1:0", "--name", "on-a-terminal"),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=other_end,
    )
    os.close(other_end)
    try:
        written = ""
        while "on-a-terminal serves greet" not in written:
            piece = os.read(terminal, 4096).decode()
            assert piece, written
            written += re.sub(r"\x1b\[[\d;]*m", "", piece)  # without the colours
        assert "INFO" in written
        assert "{" not in written
    finally:
        process.terminate()
        assert process.wait(DEADLINE) == 0
        os.close(terminal)


def test_the_log_is_json_where_there_is_no_terminal(folder: Path) -> None:
    process = subprocess.Popen(
        server_command("serve", "greeting", "--bind", "127.0.0.1:0"),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = json.loads(process.stderr.readline())
        assert "serves greet" in line["message"]
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE)
    assert process.returncode == 0


NOISY = """
    import logging
    import gradwire_server as gws

    @gws.expose
    def shout(lines: int) -> int:
        for index in range(lines):
            logging.warning("%d %s", index, "x" * 1000)
            print(index, "y" * 1000)
        return lines

    @gws.expose
    def hold() -> None:
        import threading
        threading.Event().wait()
"""


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A daemon of whose output nobody reads more than the first line, and its address."""
    (tmp_path / "served.py").write_text(textwrap.dedent(NOISY))
    process = subprocess.Popen(
        server_command("serve", "served", "--bind", "127.0.0.1:0", "--grace", "3600"),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        try:
            yield process, json.loads(process.stderr.readline())["addresses"][0]
        finally:
            process.kill()
            process.wait(DEADLINE)


ENOUGH = 500
"""Lines that fill any pipe several times."""


def test_a_log_that_nobody_reads_keeps_nobody_from_working_or_ending(
    unread: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, address = unread
    with gradwire.connect(address) as worker:
        for _ in range(2):
            assert worker.call("shout", ENOUGH, timeout=DEADLINE) == ENOUGH
        process.terminate()
        assert process.wait(DEADLINE) == 0


def serves(worker: gradwire.RemoteWorker) -> bool:
    try:
        return bool(worker.call("shout", 1, timeout=DEADLINE))
    except gradwire.Unavailable:
        return False


def test_a_second_signal_ends_a_daemon_whose_log_nobody_reads(
    unread: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, address = unread
    with gradwire.connect(address) as worker:
        worker.call("shout", ENOUGH, timeout=DEADLINE)
        held = worker.call_async("hold")
        while not worker.inspect(DEADLINE).calls:  # until it runs: the daemon waits for it
            pass
        process.terminate()
        while serves(worker):  # until the first signal has come
            pass
        process.terminate()
        assert process.wait(DEADLINE) == 143
        held.cancel()


def test_lines_that_were_dropped_are_told_once_the_log_is_read_again(
    unread: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, address = unread
    assert process.stderr is not None
    many = 20_000
    with gradwire.connect(address) as worker:
        worker.call("shout", many, timeout=DEADLINE)
    written, dropped = 0, 0
    with open(process.stderr.fileno(), closefd=False) as log:
        for text in log:
            line = json.loads(text)
            written += "xxx" in line["message"]
            if line.get("event") == "dropped" and "the log" in line["message"]:
                dropped += line["lines"]
            if written + dropped >= many:
                break
    assert written + dropped == many
    assert dropped


def test_a_daemon_that_is_started_without_outputs_serves_and_ends(folder: Path) -> None:
    command = server_command("serve", "greeting", "--bind", f"unix:{folder / 'socket'}")
    process = subprocess.Popen(["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *command], cwd=folder)
    try:
        with gradwire.connect(f"unix:{folder / 'socket'}", connect_timeout=DEADLINE) as worker:
            assert worker.greet() is None
        process.terminate()
        assert process.wait(DEADLINE) == 0
    finally:
        process.kill()
        process.wait()
