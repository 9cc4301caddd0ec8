"""The README's examples do what it says: they are run as they stand, against a real daemon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import Daemon

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ADDRESS = "127.0.0.1:50051"


def programs() -> dict[str, str]:
    """The Python blocks that name a file in their first line."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", README, flags=re.DOTALL)
    return dict(blocks)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("readme")
    (folder / "layers.py").write_text(programs()["layers.py"])
    daemon = Daemon(["layers", "--bind", "127.0.0.1:0"], cwd=folder)
    yield daemon.wait_until_ready()
    daemon.stop()


@pytest.mark.parametrize("name", [name for name in programs() if name != "layers.py"])
def test_the_program_runs_and_prints_what_its_comments_say(name: str, worker: Daemon, tmp_path: Path) -> None:
    source = programs()[name]
    (tmp_path / name).write_text(source.replace(ADDRESS, worker.address))
    ran = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    expected = [
        comment.removeprefix("... ")
        for comment in re.findall(r"print\(.*\)\s+# (.+)$", source, flags=re.MULTILINE)
    ]
    printed = ran.stdout.splitlines()
    assert len(printed) >= len(expected)
    for line, comment in zip(printed, expected, strict=False):
        assert comment in line


def test_every_page_that_is_linked_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
