"""What `make audit` says of a report: nothing is taken for audited that was not looked up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "audit-report"
FINE: dict[str, Any] = {"name": "fine", "version": "1", "vulns": []}
SKIPPED: dict[str, Any] = {"name": "odd", "skip_reason": "not found"}
VULNERABLE: dict[str, Any] = {
    "name": "bad",
    "version": "2",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}],
}


@pytest.mark.parametrize(
    ("dependencies", "status", "said"),
    [
        ([FINE], 0, "1 looked up, 0 vulnerable, 0 not audited"),
        ([FINE, VULNERABLE], 1, "bad 2: PYSEC-1, fixed in 2.1"),
        ([FINE, VULNERABLE, SKIPPED], 1, "NOT AUDITED: odd: not found"),
        ([FINE, SKIPPED], 3, "1 looked up, 0 vulnerable, 1 not audited"),
        ([SKIPPED, SKIPPED], 4, "knows none of the 2 versions: not found"),
        ([], 4, "knows none of the 0 versions"),
    ],
)
def test_the_exit_status_says_whether_all_was_looked_up(
    tmp_path: Path, dependencies: list[dict[str, Any]], status: int, said: str
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"dependencies": dependencies}))
    done = subprocess.run(
        [sys.executable, SCRIPT, report, "pypi"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, done.stderr
    assert said in done.stdout
