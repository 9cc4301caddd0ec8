"""Memory settings that torch reads once: they must be made before anything here makes a tensor."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import sys
import gradwire as gw, gradwire_server
assert gw.tune_malloc() in (True, False)
import torch
tensor = torch.ones(64 << 20, dtype=torch.uint8)
print(open("/proc/self/smaps_rollup").read())
"""


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="the system has no huge pages"
)
def test_large_tensors_are_in_huge_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = re.search(r"AnonHugePages: +(\d+) kB", done.stdout)
    assert found is not None
    assert int(found[1]) >= 32 << 10
