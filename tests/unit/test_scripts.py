"""Scripts that download: from which index, and which versions."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = "https://torch.example/whl"
DEADLINE = 60.0

# An interpreter that downloads nothing: it writes down what pip was to do.
PYTHON = """#!/bin/sh
case "$*" in
    "-m pip"*) echo "$@" >>pip.txt ;;
    *) exec {python} "$@" ;;
esac
"""

# In the place of scripts/install: an environment whose interpreter writes down what it was to run.
INSTALL = """#!/bin/sh
mkdir -p "$1/bin"
cat "$CONSTRAINTS" >installed.txt
printf '#!/bin/sh\\necho "$@" >ran.txt\\n' >"$1/bin/python"
chmod +x "$1/bin/python"
"""


@pytest.fixture
def silent_proxy() -> Iterator[str]:
    """The address of a proxy that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the scripts need of a clone."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "wheels").mkdir()
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def run(clone: Path, script: str, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    unset = ("TORCH_INDEX_URL", "PIP_ARGS", "no_proxy", "NO_PROXY")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    return subprocess.run(
        [clone / "scripts" / script, *args],
        env={**environment, "PYTHON": str(clone / "python"), **variables},
        cwd=clone,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )


def test_an_index_that_does_not_answer_is_left_out_with_a_word(clone: Path, silent_proxy: str) -> None:
    done = run(clone, "torch-index", "--cpu", https_proxy=silent_proxy)
    assert done.stdout == ""
    assert "does not answer" in done.stderr


@pytest.mark.parametrize("index", [INDEX, ""])
def test_an_index_that_was_named_is_taken_unasked(clone: Path, silent_proxy: str, index: str) -> None:
    done = run(clone, "torch-index", https_proxy=silent_proxy, TORCH_INDEX_URL=index)
    assert done.stdout.strip() == index


def test_wheels_are_downloaded_without_an_index_that_does_not_answer(clone: Path, silent_proxy: str) -> None:
    run(clone, "wheels", https_proxy=silent_proxy)
    asked = (clone / "pip.txt").read_text()
    assert "pip download" in asked
    assert "--extra-index-url" not in asked


def test_wheels_are_downloaded_from_an_index_that_was_named(clone: Path) -> None:
    run(clone, "wheels", TORCH_INDEX_URL=INDEX)
    assert f"--extra-index-url {INDEX}" in (clone / "pip.txt").read_text()


def test_the_oldest_torch_is_not_tested_again_where_it_is_the_one_that_is_pinned(clone: Path) -> None:
    text = (clone / "pyproject.toml").read_text()
    (clone / "pyproject.toml").write_text(re.sub(r'"torch>=[^"]*"', '"torch>=2.7"', text))
    (clone / "constraints.txt").write_text("torch==2.7.0\n")
    done = run(clone, "test-oldest")
    assert "2.7.0: `make test` runs on it" in done.stdout
    assert not (clone / "pip.txt").exists()


def test_the_oldest_torch_is_installed_and_tested_apart(clone: Path) -> None:
    text = (clone / "pyproject.toml").read_text()
    (clone / "pyproject.toml").write_text(re.sub(r'"torch>=[^"]*"', '"torch>=2.7,<2.9"', text))
    (clone / "constraints.txt").write_text("torch==2.8.1\nnumpy==2.4.6\n")
    (clone / "scripts" / "install").write_text(INSTALL)
    run(clone, "test-oldest", "tests/unit", "-x")
    assert (clone / "installed.txt").read_text() == "torch==2.7.0\nnumpy==2.4.6\n"
    assert (clone / "ran.txt").read_text() == "-m pytest tests/unit -x\n"
