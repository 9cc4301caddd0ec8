"""What the pages for engineers name is there, and what is there is on the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.docs.naming import ROOT, fault, native_sources, package_sources, spans

ARCHITECTURE = ROOT / "docs" / "architecture.md"
DECISIONS = ROOT / "docs" / "decisions"
PAGES = [
    ARCHITECTURE,
    ROOT / "docs" / "glossary.md",
    ROOT / "docs" / "how-it-works.md",
    *sorted(DECISIONS.glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    faults = [f"{span}: {why}" for span in spans(page.read_text()) if (why := fault(span)) is not None]
    assert not faults, "\n".join(faults)


def test_a_name_that_is_not_there_is_found() -> None:
    for span in (
        *("client/gradwire/nowhere.py", "session.Session.nothing", "Sessoin", "make nothing"),
        *("native/nowhere.hpp", "Session::nothing", "Sessoin::call"),
    ):
        assert fault(span) is not None, span
    for span in (
        *("client/gradwire/transport/session.py", "session.Session._lock", "Session", "make test"),
        *("native/session.hpp", "Session::call", "Link::mutex_"),
    ):
        assert fault(span) is None, span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_have_at_most_120_characters(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    assert not [number for number, line in lines if len(line) > 120 and not line.startswith("|")]


def test_every_decision_is_in_the_index() -> None:
    index = (DECISIONS / "README.md").read_text()
    for page in DECISIONS.glob("[0-9]*.md"):
        assert f"({page.name})" in index, page.name


def test_every_page_that_is_linked_from_a_decision_exists() -> None:
    for page in DECISIONS.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_decision_with_a_program_shows_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DECISIONS / "0007-kept-state-in-linear-time.md").read_text()
    program, printed = re.findall(r"```(?:python|text)\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(program, "0007", "exec"), {})
    assert capsys.readouterr().out == printed


def test_every_room_is_on_the_map_once_in_the_order_of_the_layers() -> None:
    layers = (ROOT / "pyproject.toml").read_text().split("layers = [", 1)[1].split("]", 1)[0]
    rooms = re.findall(r"gradwire[\w.]*", layers)
    assert rooms
    table = ARCHITECTURE.read_text().split("## The map of rooms", 1)[1].split("\n## ", 1)[0]
    assert re.findall(r"^\| `(gradwire[\w.]*)` \|", table, flags=re.MULTILINE) == rooms


def test_every_thread_is_on_the_page() -> None:
    page = ARCHITECTURE.read_text()
    threads = {
        name
        for source in package_sources()
        if "Thread" in (text := source.read_text())
        for name in re.findall(r'(?:\bname ?= ?f?|DaemonThreads\()"(gradwire-\w[\w-]*)', text)
        if name != "gradwire-server"
    }
    assert len(threads) > 10
    assert not sorted(name for name in threads if f"`{name}`" not in page)


def test_every_native_file_is_on_the_page() -> None:
    page = ARCHITECTURE.read_text()
    stems = {source.stem for source in native_sources()}
    assert not sorted(stem for stem in stems if f"`native/{stem}." not in page)


def test_every_native_thread_is_on_the_page() -> None:
    page = ARCHITECTURE.read_text()
    started = [
        found
        for source in native_sources()
        for found in re.findall(r"std::j?thread[({]\[this\] \{ (\w+)\(", source.read_text())
    ]
    assert started
    assert not [found for found in started if not re.search(rf"`\w+::{found}`", page)]


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
    page = ARCHITECTURE.read_text()
    locks = {lock for source in package_sources() for lock in _locks(source)}
    assert len(locks) > 30
    assert not sorted(lock for lock in locks if f"`{lock}`" not in page)


def _native_locks(source: Path) -> set[str]:
    """The mutexes that native code has, as `Class::member`, or as the name of one that is no member."""
    found, owner = set(), None
    for line in source.read_text().splitlines():
        if opened := re.match(r"(?:class|struct) (\w+)\b.*\{$", line):
            owner = opened[1]
        elif line.startswith("}"):
            owner = None
        elif made := re.match(r"\s*(?:mutable |static )*(?:std::\w*mutex|FairMutex) (\w+);", line):
            found.add(f"{owner}::{made[1]}" if owner else made[1])
    return found


def test_every_native_lock_is_on_the_page() -> None:
    page = ARCHITECTURE.read_text()
    locks = {lock for source in native_sources() for lock in _native_locks(source)}
    assert len(locks) > 6
    assert not sorted(lock for lock in locks if f"`{lock}`" not in page)
