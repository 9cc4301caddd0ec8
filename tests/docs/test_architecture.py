"""What the pages for engineers name is there: files, modules, classes, functions, fields and make targets."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

import gradwire
import gradwire_server

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "glossary.md",
    ROOT / "docs" / "how-it-works.md",
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
FOLDERS = ("benchmarks", "client", "docs", "examples", "protos", "scripts", "server", "tests")
ALIASES = {"gw": "gradwire", "gws": "gradwire_server"}
FOREIGN = {
    *("GLIBC_TUNABLES", "M_MMAP_THRESHOLD", "M_TRIM_THRESHOLD", "process_vm_readv"),  # of the system
    *("RecvRpcBackward", "SendRpcBackward"),  # of PyTorch's distributed autograd
    *("dist_autograd.context", "test_backward_unused_send_function"),
    *("grpc.server.max_pending_requests", "grpc"),
}
"""Names that are not ours."""
VARIABLES = {"ctx", "error", "loss", "module", "optimizer", "worker"}
"""Of examples: what follows the dot is looked for as a word."""


def _spans(page: Path) -> list[str]:
    """What stands between backticks, outside of blocks of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return list(dict.fromkeys(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)))


@cache
def _words() -> frozenset[str]:
    """Every word of the sources, generated code left out."""
    sources = [
        path
        for folder in FOLDERS
        for pattern in ("*.py", "*.proto")
        for path in (ROOT / folder).rglob(pattern)
        if "_pb2" not in path.name and path != Path(__file__)
    ]
    return frozenset(word for source in sources for word in re.findall(r"\w+", source.read_text()))


@cache
def _modules() -> dict[str, object]:
    found: dict[str, object] = {"gradwire": gradwire, "gradwire_server": gradwire_server}
    for package in (gradwire, gradwire_server):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".proto." not in module.name and not module.name.endswith("__main__"):
                found[module.name] = importlib.import_module(module.name)
    return found


def _classes(name: str) -> list[object]:
    found = (getattr(module, name, None) for module in _modules().values())
    return [value for value in found if inspect.isclass(value)]


def _has(owner: object, names: list[str]) -> bool:
    """Whether an attribute is there, or is set in the methods of a class."""
    if not names:
        return True
    first, *rest = names
    if hasattr(owner, first):
        return _has(getattr(owner, first), rest)
    if inspect.isclass(owner) and first in getattr(owner, "__annotations__", {}):
        return not rest
    if not inspect.isclass(owner) or rest:
        return False
    files = {inspect.getfile(base) for base in owner.__mro__ if base.__module__.startswith("gradwire")}
    sources = (Path(file).read_text() for file in files if "_pb2" not in file)
    return any(re.search(rf"\bself\.{first}\b", source) for source in sources)


def _is_there(dotted: str) -> bool:
    """Whether `room.module.name`, `module.name` or `Class.name` exists."""
    first, *rest = dotted.split(".")
    first = ALIASES.get(first, first)
    if first in VARIABLES:
        return _words().issuperset(rest)
    if first in ("concurrent", "multiprocessing", "torch", "typer"):
        return pkgutil.resolve_name(dotted) is not None
    names = [first, *rest]
    for path, module in _modules().items():
        inner = path.split(".")
        for length in range(len(names), 0, -1):
            if inner[-length:] == names[:length] and _has(module, names[length:]):
                return True
    return any(_has(owner, rest) for owner in _classes(first)) or _is_field(first, rest)


def _is_field(message: str, names: list[str]) -> bool:
    """Whether a message of the protos has a field, or an enum a value."""
    protos = "".join(path.read_text() for path in (ROOT / "protos").rglob("*.proto"))
    body = re.search(rf"^(?:message|enum|service) {message} \{{(.*?)^\}}", protos, re.DOTALL | re.MULTILINE)
    return body is not None and all(re.search(rf"\b{name}\b", body.group(1)) for name in names)


def _fault(span: str) -> str | None:
    """What is wrong with a name; None if it is there, or is no name."""
    if span.startswith("make "):
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if span.split()[1] in targets else "no such target"
    if span.split("/")[0] in FOLDERS and re.fullmatch(r"[\w./*-]+", span):
        return None if list(ROOT.glob(span)) else "no such file"
    name = span.removesuffix("()")
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name) and not re.search(r"\.(md|toml|txt|json)$", name):
        return None if name in FOREIGN or _is_there(name) else "no such name"
    if re.fullmatch(r"[A-Za-z_]\w*", name):
        return None if name in FOREIGN or name in _words() or hasattr(builtins, name) else "no such word"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    faults = [f"{span}: {fault}" for span in _spans(page) if (fault := _fault(span)) is not None]
    assert not faults, "\n".join(faults)


def test_a_name_that_is_not_there_is_found() -> None:
    for span in ("client/gradwire/nowhere.py", "session.Session.nothing", "Sessoin", "make nothing"):
        assert _fault(span) is not None, span
    for span in ("client/gradwire/transport/session.py", "session.Session._lock", "Session", "make test"):
        assert _fault(span) is None, span


def test_every_room_is_on_the_map() -> None:
    layers = (ROOT / "pyproject.toml").read_text().split("layers = [", 1)[1].split("]", 1)[0]
    rooms = re.findall(r"gradwire[\w.]*", layers)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert rooms
    assert not [room for room in rooms if f"`{room}`" not in page]


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md"):
        assert f"({page.name})" in index, page.name


def test_every_page_that_is_linked_from_a_decision_exists() -> None:
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_have_at_most_120_characters(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    assert not [number for number, line in lines if len(line) > 120 and not line.startswith("|")]


def _sources() -> list[Path]:
    packages = (ROOT / "client" / "gradwire", ROOT / "server" / "gradwire_server")
    return [path for package in packages for path in package.rglob("*.py") if "_pb2" not in path.name]


def test_every_thread_is_on_the_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = r"""(?:\bname ?= ?f?|DaemonThreads\()"(gradwire[\w-]*)(?:\{role\}-\{)?"""
    missing = [
        (source.name, name)
        for source in _sources()
        if "Thread" in source.read_text()
        for name in re.findall(named, source.read_text())
        if name not in ("gradwire-server", "gradwire-") and f"`{name}" not in page
    ]
    assert not missing


def _locks(source: Path) -> set[str]:
    """The locks that a module makes, as `Class.attribute` or `module.name`. Not conditions on other locks."""
    found = set()

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Assign) and isinstance(child.value, ast.Call):
                made = ast.unparse(child.value)
                if re.match(r"threading\.(R?Lock\(\)|Condition\((threading\..*)?\)$)", made):
                    for target in child.targets:
                        found.add(f"{owner}.{ast.unparse(target).removeprefix('self.')}")
            visit(child, child.name if isinstance(child, ast.ClassDef) else owner)

    visit(ast.parse(source.read_text()), source.stem)
    return found


def test_every_lock_is_on_the_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    locks = {lock for source in _sources() for lock in _locks(source)}
    assert len(locks) > 30
    assert not sorted(lock for lock in locks if f"`{lock}`" not in page)
