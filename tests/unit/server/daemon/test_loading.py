"""Loading what is to be served: what is found, and what is said when it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire_server.daemon.loading import load, load_all, use_working_directory
from gradwire_server.errors import LoadFailed, NothingExposed
from gradwire_server.objects.exposing import exposed_in

Write = Callable[[str, str], None]

FUNCTIONS = """\
import gradwire_server as gws

@gws.expose
def shown(): return 1

def hidden(): return 2

twice = lambda x: 2 * x

class Box:
    def __call__(self): return 3
    def method(self): return 4

box = Box()
number = 5
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules into the working directory; they are forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)

    def write(name: str, source: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        use_working_directory()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def failure(spec: str) -> str:
    with pytest.raises(LoadFailed) as raised:
        load(spec)
    assert raised.value.exit_code == 4
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_module_and_objects_in_their_order(write: Write) -> None:
    write("functions_a.py", FUNCTIONS)
    module, hidden = load_all(["functions_a", "functions_a:hidden", "functions_a"])
    assert module is sys.modules["functions_a"]
    assert hidden is sys.modules["functions_a"].hidden


def test_a_module_in_a_package(write: Write) -> None:
    write("package_a/__init__.py", "")
    write("package_a/functions.py", FUNCTIONS)
    assert load("package_a.functions") is sys.modules["package_a.functions"]


def test_an_object_is_called_what_the_module_calls_it(write: Write) -> None:
    write("functions_b.py", FUNCTIONS)
    for name in ("twice", "box", "box.method", "Box"):
        load(f"functions_b:{name}")
    names = [name for name, _ in exposed_in(sys.modules["functions_b"])]
    assert {"twice", "box", "Box"} <= set(names)


def test_a_module_that_exposes_nothing(write: Write) -> None:
    write("nothing_a.py", "import os\ndef helper(): ...\n")
    with pytest.raises(NothingExposed) as raised:
        load("nothing_a")
    assert raised.value.exit_code == 5
    assert "'nothing_a' exposes nothing (nothing_a.py)" in str(raised.value)
    assert "nothing_a:helper" in str(raised.value)


def test_no_such_module(write: Write) -> None:
    write("layers_a.py", FUNCTIONS)
    assert "no module named 'layer_a' in" in failure("layer_a")
    assert "did you mean 'layers_a'?" in failure("layer_a")
    assert "as in 'layers_a', not its file" in failure("layers_a.py")
    assert "as in 'sub.layers_a', not its file" in failure("./sub/layers_a.py")


def test_no_such_object(write: Write) -> None:
    write("functions_c.py", FUNCTIONS)
    assert failure("functions_c:hiden") == (
        "module 'functions_c' has no object 'hiden' (functions_c.py); did you mean 'hidden'?"
    )
    assert "is a int, which cannot be called" in failure("functions_c:number")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\n\n1 / 0\n", "ZeroDivisionError: division by zero (broken.py:3)"),
        ("def f(:\n", "SyntaxError: invalid syntax (broken.py:1)"),
        ("\nimport not_installed_anywhere\n", "No module named 'not_installed_anywhere' (broken.py:2)"),
        ("raise SystemExit(3)\n", "SystemExit: 3 (broken.py:1)"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines (broken.py:1)"),
        ("raise KeyError\n", "KeyError (broken.py:1)"),
        ("import json\n\njson.loads('{')\n", "(broken.py:3)"),
    ],
)
def test_a_module_that_raises(write: Write, source: str, said: str) -> None:
    write("broken.py", source)
    message = failure("broken")
    assert message.startswith("cannot import 'broken': ")
    assert message.endswith(said)
