"""What native/abi3 declares of Python's stable ABI is what CPython's own header declares."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

OURS = Path(__file__).parents[2] / "native" / "abi3" / "Python.h"
THEIRS = Path(sysconfig.get_paths()["include"]) / "Python.h"
COMPILER = shutil.which("c++") or ""
DEADLINE = 100.0

pytestmark = pytest.mark.skipif(
    not COMPILER or not THEIRS.exists(), reason="needs a compiler, and the header that comes with CPython"
)


def compiled(source: str, header: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """What the compiler says to a source that includes one of the two headers."""
    return subprocess.run(
        [COMPILER, "-std=c++20", f"-I{header.parent}", *flags, "-x", "c++", "-"],
        input=f"#define Py_LIMITED_API 0x030B0000\n#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n{source}",
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def test_functions_are_declared_as_by_cpython() -> None:
    """The compiler refuses a function that was declared in two ways."""
    both = f'#include "{OURS}"\n'
    assert compiled(both, THEIRS, "-fsyntax-only").stderr == ""
    assert (
        "Py_IncRef"
        in compiled(f'{both}extern "C" int Py_IncRef(PyObject*);\n', THEIRS, "-fsyntax-only").stderr
    )


def test_structures_and_constants_are_those_of_cpython(tmp_path: Path) -> None:
    text = OURS.read_text()
    values = re.findall(r"^#define ((?:METH_|Py_TPFLAGS_|Py_[a-z]+_|PyBUF_)\w+) ", text, re.MULTILINE)
    for structure, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL):
        values.append(f"sizeof({structure})")
        for field in re.findall(r"(\w+)(?:\)\(\))?;$", body, re.MULTILINE):
            values.append(f"offsetof({structure}, {field})")
    lines = "".join(f'std::printf("{value} %lu\\n", (unsigned long)({value}));\n' for value in values)
    source = f"#include <cstddef>\n#include <cstdio>\nint main() {{\n{lines}}}\n"
    said = []
    for header in (OURS, THEIRS):
        program = tmp_path / header.parent.name
        done = compiled(source, header, "-o", str(program))
        assert done.returncode == 0, done.stderr
        said.append(subprocess.run([program], capture_output=True, text=True, timeout=DEADLINE).stdout)
    assert said[0].splitlines() == said[1].splitlines()
    assert len(said[0].splitlines()) == len(values) > 80
