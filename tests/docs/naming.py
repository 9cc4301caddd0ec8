"""What the pages for engineers name: files, modules, classes, functions, fields and make targets.

Names of Python have dots, `Session.send_request`; those of `native/` have colons, `Session::call`.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

import gradwire
import gradwire_server

__all__ = ["ROOT", "fault", "native_sources", "package_sources", "resolve", "spans"]

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "client", "docs", "examples", "native", "protos", "scripts", "server", "tests")
ALIASES = {"gw": "gradwire", "gws": "gradwire_server"}
OTHER_PACKAGES = ("concurrent", "multiprocessing", "torch", "typer")
FOREIGN = {
    *("GLIBC_TUNABLES", "M_MMAP_THRESHOLD", "M_TRIM_THRESHOLD", "process_vm_readv"),  # of the system
    *("RecvRpcBackward", "SendRpcBackward"),  # of PyTorch's distributed autograd
    *("dist_autograd.context", "test_backward_unused_send_function"),
    *("grpc.server.max_pending_requests", "grpc"),
}
"""Names that are not ours."""
VARIABLES = {"ctx", "error", "loss", "module", "optimizer", "worker"}
"""Of examples: what follows the dot is looked for as a word."""


def spans(text: str) -> list[str]:
    """What stands between backticks, outside of blocks of code, once each."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return list(dict.fromkeys(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)))


def package_sources() -> list[Path]:
    """The modules of both packages, generated code left out."""
    packages = (ROOT / "client" / "gradwire", ROOT / "server" / "gradwire_server")
    return [path for package in packages for path in package.rglob("*.py") if "_pb2" not in path.name]


def native_sources() -> list[Path]:
    """The native code, without its fuzzer and the declarations of Python's stable ABI."""
    return sorted(path for path in (ROOT / "native").iterdir() if path.suffix in (".cpp", ".hpp"))


@cache
def _words() -> frozenset[str]:
    """Every word of the sources, generated code left out."""
    sources = [
        path
        for folder in FOLDERS
        for pattern in ("*.py", "*.proto")
        for path in (ROOT / folder).rglob(pattern)
        if "_pb2" not in path.name and path.parent != Path(__file__).parent
    ]
    sources += native_sources()
    return frozenset(word for source in sources for word in re.findall(r"\w+", source.read_text()))


@cache
def _modules() -> dict[str, object]:
    found: dict[str, object] = {"gradwire": gradwire, "gradwire_server": gradwire_server}
    for package in (gradwire, gradwire_server):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".proto." not in module.name and not module.name.endswith("__main__"):
                found[module.name] = importlib.import_module(module.name)
    return found


def resolve(dotted: str) -> object | None:
    """The object of a `room.module.name`, `module.name` or `Class.name`; None if there is none."""
    first, *rest = dotted.split(".")
    names = [ALIASES.get(first, first), *rest]
    for path, module in _modules().items():
        inner = path.split(".")
        for length in range(len(names), 0, -1):
            if inner[-length:] == names[:length]:
                found = _member(module, names[length:])
                if found is not None:
                    return found
    owners = [getattr(module, first, None) for module in _modules().values()]
    return next((found for owner in owners if (found := _member(owner, rest)) is not None), None)


def _member(owner: object, names: list[str]) -> object | None:
    """What is found by following names. An attribute that methods of a class set counts as the class."""
    if not names or owner is None:
        return owner
    first, *rest = names
    if hasattr(owner, first):
        return _member(getattr(owner, first), rest)
    if not inspect.isclass(owner) or rest:
        return None
    if first in getattr(owner, "__annotations__", {}):
        return owner
    files = {inspect.getfile(base) for base in owner.__mro__ if base.__module__.startswith("gradwire")}
    sources = (Path(file).read_text() for file in files if file.endswith(".py") and "_pb2" not in file)
    return owner if any(re.search(rf"\bself\.{first}\b", source) for source in sources) else None


def _is_there(dotted: str) -> bool:
    first, *rest = dotted.split(".")
    if first in VARIABLES:
        return _words().issuperset(rest)
    if first in OTHER_PACKAGES:
        return pkgutil.resolve_name(dotted) is not None
    return resolve(dotted) is not None or _is_field(first, rest)


def _is_native(name: str, member: str) -> bool:
    """Whether a class of the native code has a member, by its declaration."""
    sources = "".join(re.sub("//.*", "", path.read_text()) for path in native_sources())
    bodies = re.findall(rf"^(?:class|struct) {name}\b[^;{{]*\{{(.*?)^\}};", sources, re.DOTALL | re.MULTILINE)
    return any(re.search(rf"\b{member}\b", body) for body in bodies)


def _is_field(message: str, names: list[str]) -> bool:
    """Whether a message of the protos has a field, or an enum a value."""
    protos = "".join(path.read_text() for path in (ROOT / "protos").rglob("*.proto"))
    body = re.search(rf"^(?:message|enum|service) {message} \{{(.*?)^\}}", protos, re.DOTALL | re.MULTILINE)
    return body is not None and all(re.search(rf"\b{name}\b", body.group(1)) for name in names)


def fault(span: str) -> str | None:
    """What is wrong with a name; None if it is there, or is no name."""
    if span.startswith("make "):
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return None if span.split()[1] in targets else "no such target"
    if span.split("/")[0] in FOLDERS and re.fullmatch(r"[\w./*-]+", span):
        return None if list(ROOT.glob(span)) else "no such file"
    name = span.removesuffix("()")
    if re.fullmatch(r"\w+::\w+", name):
        return None if _is_native(*name.split("::")) else "no such name in native/"
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name) and not re.search(r"\.(md|toml|txt|json)$", name):
        return None if name in FOREIGN or _is_there(name) else "no such name"
    if re.fullmatch(r"[A-Za-z_]\w*", name):
        return None if name in FOREIGN or name in _words() or hasattr(builtins, name) else "no such word"
    return None
