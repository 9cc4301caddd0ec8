"""The rooms of both packages use of each other only what has a public name.

A room is a sub-package, or a module that stands directly in one of the two packages. Which room may import
which is import-linter's to check; these tests check that the private names of a room stay private.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"gradwire": ROOT / "client" / "gradwire", "gradwire_server": ROOT / "server" / "gradwire_server"}

ALLOWED_IMPORTS = {
    # The lists of the public names, and of the version, for the package itself and for what shows the
    # version.
    "gradwire._public",
    "gradwire._version",
}


def _modules() -> dict[str, ast.Module]:
    """The syntax trees of all modules but the generated ones, by dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] != "proto":
                name = ".".join([package, *(part for part in parts if part != "__init__")])
                found[name] = ast.parse(path.read_text(), str(path))
    return found


MODULES = _modules()


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the full dotted name of everything of the two packages that a module imports."""
    is_package = (PACKAGES[module.split(".")[0]].parent / Path(*module.split("."))).is_dir()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package that the module is in: for the module of a package, that package itself.
            parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
            base = ".".join([*(parents if node.level else []), *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def _is_own(node: ast.Attribute) -> bool:
    """Whether it is an attribute of the object or class that the code belongs to."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Every private name that a module gives to an attribute: of itself, of a class, or of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            yield node.attr
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                targets = statement.targets if isinstance(statement, ast.Assign) else []
                if isinstance(statement, ast.AnnAssign):
                    targets = [statement.target]
                for target in targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            yield name.id
                    if isinstance(target, ast.Name) and target.id == "__slots__":
                        yield from ast.literal_eval(statement.value)  # type: ignore[attr-defined]


def _accesses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the name of each private attribute that is looked up on anything but `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node):
            yield node.lineno, node.attr


DEFINED: dict[str, set[str]] = defaultdict(set)
"""The private names that each room defines."""
for _module, _tree in MODULES.items():
    DEFINED[_room(_module)].update(filter(_is_private, _defined_names(_tree)))
DEFINED_ANYWHERE = set().union(*DEFINED.values())


def test_no_room_imports_a_private_name_of_another() -> None:
    foreign = [
        f"{module}:{line} imports {name}"
        for module, tree in MODULES.items()
        for line, name in _imports(module, tree)
        if name.split(".")[0] in PACKAGES
        and _room(name) != _room(module)
        and any(map(_is_private, name.split(".")))
        and not any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED_IMPORTS)
    ]
    assert foreign == []


def test_no_room_looks_at_a_private_attribute_of_another() -> None:
    foreign = [
        f"{module}:{line} looks at {name}"
        for module, tree in MODULES.items()
        for line, name in _accesses(tree)
        if name in DEFINED_ANYWHERE and name not in DEFINED[_room(module)]
    ]
    assert foreign == []


def test_both_packages_were_read() -> None:
    assert {"gradwire", "gradwire.wire.codecs", "gradwire_server.worker"} <= MODULES.keys()
    assert {"_link", "_lock"} <= DEFINED_ANYWHERE
