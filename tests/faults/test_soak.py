"""A short soak: ``make soak`` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(240)
def test_a_short_soak_finds_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--seconds", "8", "--seed", "3", "--clients", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all results exact" in ran.stdout
