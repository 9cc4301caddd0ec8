"""What contributors are held to: the form of commit messages, hooks that exist, words in protos."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check_message(message: str, path: Path) -> tuple[int, str]:
    path.write_text(message)
    command = [sys.executable, ROOT / "scripts" / "check-commit-message", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "message",
    [
        "Fix wrong gradients when contexts share kept state\n",
        "Docs: name the limits of a backward\n\nThey were not written down.\n",
        "Draw ids from the system, not the seedable random\n\nA seed made two peers the same.\n\nMore.\n",
        "\nUse one lock\n# Please enter the commit message for your changes.\n",
        "Use one lock\n# ------------------------ >8 ------------------------\ndiff --git a/x b/x\n",
        f"Merge branch {'x' * 80}\n",
        "fixup! added a lock.\n",
        "A" * 72,
    ],
)
def test_a_message_in_the_usual_form_passes(message: str, tmp_path: Path) -> None:
    assert check_message(message, tmp_path / "message") == (0, "")


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("A" * 73, "the subject has 73 characters; at most 72"),
        ("Use one lock.\n", "ends with a period"),
        ("Use one lock\nTwo were one too many.\n", "the second line is not blank"),
        ("use one lock\n", "does not begin with a capital letter"),
        ("Added a lock\n", "'Added' is no order"),
        ("Fixes the lock\n", "'Fixes' is no order"),
        ("Tests: using one lock\n", "'using' is no order"),
        ("\n# Please enter the commit message for your changes.\n", "it is empty"),
    ],
)
def test_a_message_in_another_form_is_refused_with_the_reason(
    message: str, complaint: str, tmp_path: Path
) -> None:
    status, said = check_message(message, tmp_path / "message")
    assert status == 1
    assert complaint in said


def test_what_the_hooks_run_is_there() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    commands = re.findall(r"^ +entry: (\S+)", config, re.MULTILINE)
    assert len(commands) == config.count("- id: ") == 6
    scripts = [ROOT / command for command in commands if command.startswith("scripts/")]
    assert len(scripts) == 2
    assert all(os.access(script, os.X_OK) for script in scripts)
    tools = {Path(command).name for command in commands if command.startswith(".venv/bin/")}
    developing = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "dev"
    ]
    assert {"import-linter" if tool == "lint-imports" else tool for tool in tools} <= set(developing)
    assert "pre-commit" in developing


def test_in_protos_a_node_is_one_of_the_graph() -> None:
    """A process is a peer."""
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code, _, comment = line.partition("//")
            assert not re.search("node", code, re.IGNORECASE), f"{path.name}:{number}: {line}"
            of_graphs = re.sub(r"(?i)\b(graph|leaf|send|recv) nodes?\b", "", comment)
            assert not re.search(r"(?i)\bnodes?\b", of_graphs), f"{path.name}:{number}: {line}"
