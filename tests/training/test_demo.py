"""The demo that people run first, as they run it: a process of its own that starts real daemons."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK_STEPS = 2 * 23
DEADLINE = 110.0
"""Three processes load torch, on a machine that may be busy."""


def start(*command: str) -> subprocess.Popen[str]:
    """Starts Python in the folder of the examples, with what it writes in one pipe."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=EXAMPLES,
        env={key: value for key, value in os.environ.items() if not key.startswith("GRADWIRE_")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Where SIGINT is ignored, as in a shell's background jobs, children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def run(*command: str) -> tuple[int, str]:
    """The exit code, and what was written."""
    with start(*command) as process:
        try:
            written, _ = process.communicate(timeout=DEADLINE)
        finally:
            process.terminate()  # it then ends its workers
    return process.returncode, written


def listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_split_and_whole_agree_at_every_step(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    code, written = run("demo.py", "--quick", "--output", str(picture))
    assert code == 0, written
    agreement = re.search(r"✓ losses agree at all (\d+) steps: largest difference (\S+)", written)
    assert agreement is not None, written
    assert int(agreement[1]) == QUICK_STEPS
    assert float(agreement[2]) <= 1e-5
    assert "✓ parameters agree after training" in written
    assert str(picture) in written
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_ctrl_c_leaves_no_worker_behind(tmp_path: Path) -> None:
    addresses: list[str] = []
    with start("demo.py", "--output", str(tmp_path / "demo.png")) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            addresses += re.findall(r"worker-. at (\S+)", line)
            if "epoch" in line:
                break
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
        assert demo.wait(DEADLINE) == 130, rest
    assert len(addresses) == 2
    assert not any(listens(address) for address in addresses)


def test_a_worker_that_does_not_start_is_explained() -> None:
    code, written = run(
        "-c", "from local_workers import workers_for\nwith workers_for('no_such_module'): pass"
    )
    assert code == 1
    assert "Worker 'a' did not start." in written
    assert "no module named 'no_such_module'" in written


def test_a_picture_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    code, written = run("demo.py", "--output", str(tmp_path / "missing" / "demo.png"))
    assert code == 2
    assert "--output" in written
