"""``gradwire ls``, ``call`` and ``ping`` against a real daemon."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE, Daemon, run

import gradwire
from gradwire.transport import native

SERVED = """
    import torch
    import gradwire_server as gws

    @gws.expose
    def add(a: int, b: int = 2) -> int:
        '''Adds two numbers.

        Nothing else.
        '''
        return a + b

    @gws.expose
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @gws.expose
    def same(*args, **kwargs):
        return [list(args), kwargs]

    @gws.expose
    def fail() -> None:
        raise ValueError("no [luck] today")

    @gws.expose
    def hold(path: str) -> str:
        with open(path) as pipe:
            return pipe.read()
"""


@pytest.fixture(scope="module")
def daemon(module_launch: Launch) -> Daemon:
    return module_launch(SERVED, "--name", "tester")


def gradwire_command(*args: str) -> subprocess.CompletedProcess[str]:
    return run("gradwire.cli", *args)


def test_version() -> None:
    command = [sys.executable, "-m", "gradwire.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0
    compiled = f"native module: compiled with {native.compiler}"
    assert done.stdout.splitlines() == [f"gradwire {gradwire.__version__}", compiled]


# -- ls


def test_ls_shows_a_table(daemon: Daemon) -> None:
    done = gradwire_command("ls", daemon.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"tester at {daemon.address}")
    assert re.search(r"^add +\(a: int, b: int = 2\) -> int +Adds two numbers\.$", done.stdout, re.MULTILINE)
    assert re.search(r"^double +\(x: torch\.Tensor\) -> torch\.Tensor", done.stdout, re.MULTILINE)
    assert "Nothing else" not in done.stdout


def test_ls_as_json(daemon: Daemon) -> None:
    done = gradwire_command("ls", daemon.address, "--json")
    listing = json.loads(done.stdout)
    assert listing["name"] == "tester"
    functions = {function["name"]: function for function in listing["functions"]}
    assert functions.keys() == {"add", "double", "fail", "hold", "same"}
    assert functions["add"]["doc"] == "Adds two numbers.\n\nNothing else."
    assert [parameter["required"] for parameter in functions["add"]["parameters"]] == [True, False]


# -- call


def test_call_prints_the_result(daemon: Daemon) -> None:
    done = gradwire_command("call", daemon.address, "add", "-1", "b=-2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "-3\n", "")


def test_call_takes_json_literals_strings_and_keywords(daemon: Daemon) -> None:
    done = gradwire_command(
        *("call", daemon.address, "same", "--json"),
        *(
            "3",
            "-0.5",
            "true",
            "None",
            "[1, null]",
            "(1, 2)",
            "hello",
            '"3"',
            '"a=b"',
            'k={"x": 1}',
            "s=text",
        ),
    )
    assert json.loads(done.stdout) == [
        [3, -0.5, True, None, [1, None], [1, 2], "hello", "3", "a=b"],
        {"k": {"x": 1}, "s": "text"},
    ]


def test_call_takes_and_prints_tensors(daemon: Daemon) -> None:
    done = gradwire_command("call", daemon.address, "double", "t:[[1.0,2],[3,4]]")
    assert done.stdout == "tensor([[2., 4.],\n        [6., 8.]])\n"
    done = gradwire_command("call", daemon.address, "double", "t:float64:[1, 2.5]", "--json")
    assert done.stdout == "[2.0, 5.0]\n"


def test_an_error_of_the_function_comes_with_the_traceback_of_the_worker(daemon: Daemon) -> None:
    done = gradwire_command("call", daemon.address, "fail")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == "error: ValueError: no [luck] today (on tester)"
    assert "served.py" in done.stderr
    assert "gradwire/cli" not in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ad", "1"], "did you mean add"),
        (["add"], "missing a required argument: 'a'"),
        (["hold", "/dev/null/nothing", "--timeout", "5"], "NotADirectoryError"),
    ],
)
def test_what_goes_wrong_is_said_and_exits_with_1(daemon: Daemon, args: list[str], said: str) -> None:
    done = gradwire_command("call", daemon.address, *args)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert said in done.stderr.splitlines()[0]


def test_a_mistyped_option_or_literal_is_wrong_usage(daemon: Daemon) -> None:
    for wrong in ("--timout", "[1, 2"):
        done = gradwire_command("call", daemon.address, "same", wrong)
        assert done.returncode == 2
        assert wrong in done.stderr


def test_a_function_may_have_parameters_that_are_called_as_options_of_the_command(daemon: Daemon) -> None:
    arguments = ("timeout=3", "name=ada", "function=f")
    done = gradwire_command("call", daemon.address, "same", *arguments, "--timeout", "30", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [[], {"timeout": 3, "name": "ada", "function": "f"}]


def test_a_call_ends_with_its_timeout(daemon: Daemon, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = gradwire_command("call", daemon.address, "hold", str(pipe), "--timeout", "0.2")
    # Opened for both, it does not wait for a reader; the call that still waits there ends.
    os.close(os.open(pipe, os.O_RDWR))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    # What is left of it when the link is there.
    assert re.search(r"did not respond within 0\.[12]\d* s$", done.stderr.strip())


# -- ping


def test_ping_prints_times_and_statistics(daemon: Daemon) -> None:
    done = gradwire_command("ping", daemon.address, "-c", "3", "-i", "0")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"PING tester ({daemon.address})"
    for number, line in enumerate(lines[1:4], start=1):
        assert re.fullmatch(rf"response from tester: seq={number} time=\d+\.\d+ ms", line)
    assert lines[5] == "3 sent, 3 received, 0% lost"
    times = re.fullmatch(r"round trip min/avg/max/p50 = ([\d.]+)/([\d.]+)/([\d.]+)/([\d.]+) ms", lines[6])
    assert times is not None
    least, mean, most, median = map(float, times.groups())
    assert 0 < least <= min(mean, median)
    assert max(mean, median) <= most


def test_ping_ends_with_statistics_on_ctrl_c(daemon: Daemon) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "gradwire.cli", "ping", daemon.address, "-i", "3600"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        while "seq=1" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "1 sent, 1 received, 0% lost" in rest


def test_nothing_there_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        # Bound but not listening: nobody else can take the port, and nobody responds.
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = gradwire_command("ping", address, "-c", "1", "--connect-timeout", "0.5")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert address in done.stderr


def test_a_unix_socket_can_be_the_target(launch: Launch, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/worker.sock"
    launch(SERVED, bind=address)
    done = gradwire_command("call", address, "add", "20", "22")
    assert (done.returncode, done.stdout) == (0, "42\n")


def test_gradcheck_compares_with_finite_differences(daemon: Daemon) -> None:
    done = gradwire_command("gradcheck", daemon.address, "double", "--shape", "2,3")
    assert done.returncode == 0, done.stderr
    assert "finite differences" in done.stdout
    assert "ok" in done.stdout


@pytest.mark.parametrize(
    ("codecs", "results_are_exact", "gradients_are_exact"),
    [
        (["int8"], False, False),
        (["zstd"], True, True),
        (["backward=int8"], True, False),
        (["forward=bf16"], False, True),
        (["forward=fp16", "backward=zstd"], False, True),
    ],
)
def test_gradcheck_shows_what_a_codec_does(
    daemon: Daemon, codecs: list[str], results_are_exact: bool, gradients_are_exact: bool
) -> None:
    chosen = [option for codec in codecs for option in ("--codec", codec)]
    shape = ["--shape", "64,64", "--dtype", "float32"]
    done = gradwire_command("gradcheck", daemon.address, "double", *shape, *chosen)
    assert done.returncode == 0, done.stderr
    rows = {
        line.rpartition(" kB ")[0][:8]: line.split()[-1] for line in done.stdout.splitlines() if "kB" in line
    }
    assert (float(rows["result 0"]) == 0) == results_are_exact
    assert (float(rows["gradient"]) == 0) == gradients_are_exact
    assert " saved by Compression(" in done.stdout


def test_gradcheck_judges_a_codec_only_if_told(daemon: Daemon) -> None:
    command = ["gradcheck", daemon.address, "double", "--shape", "64,64", "--codec", "int8", "--tolerance"]
    assert gradwire_command(*command, "0.1").returncode == 0
    assert gradwire_command(*command, "1e-6").returncode == 1
    small = gradwire_command("gradcheck", daemon.address, "double", "--shape", "2,2", "--codec", "int8")
    assert "Nothing was compressed" in small.stdout
    for wrong in ("mp3", "sideways=int8"):
        refused = gradwire_command("gradcheck", daemon.address, "double", "--shape", "2", "--codec", wrong)
        assert refused.returncode == 2
