"""Compiles native/*.cpp to the extension gradwire.transport.native.

As hatchling's build hook it puts the extension into the wheel or, for an editable install, into the source
tree. scripts/native calls it to do the latter again.

hatch_build.py OUTPUT         compile to OUTPUT
hatch_build.py --requires     what has to be installed for that: a compiler, or nothing

CXX                  the compiler; unset: the first of c++, g++ and clang++ that knows C++20, else ziglang's
CXXFLAGS, LDFLAGS    further flags
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).resolve().parent / "native"
MODULE = "gradwire/transport/native.abi3.so"
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
# native/abi3 declares Python's stable ABI: many Pythons come without their Python.h.
DEFINITIONS = ["-DPy_LIMITED_API=0x030B0000", f"-I{NATIVE / 'abi3'}"]

ZIG = "ziglang"
"""A package with a compiler and all it needs, for where there is none."""
# Unless told, zig makes code for the very processor that it runs on; wheels and images are run on others too.
# It has no macro that says it is zig, either.
ZIG_COMMAND = [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline", "-DZIG"]

PROBE = "#include <bit>\n#include <span>\nint main() { return std::span<int>().size() + std::popcount(0u); }"


def _works(compiler: str) -> bool:
    """Whether there is such a compiler, with a C++20 library and a linker."""
    if not shutil.which(compiler):
        return False
    command = [compiler, "-std=c++20", "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input=PROBE, text=True, capture_output=True).returncode == 0


@cache
def system_compiler() -> list[str]:
    """The command of the compiler that $CXX names, or of one that works; empty if there is none."""
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    return next(([name] for name in ("c++", "g++", "clang++") if _works(name)), [])


def requirements() -> list[str]:
    """What has to be installed to compile."""
    return [] if system_compiler() else [ZIG]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise SystemExit(
            f"error: gradwire's native module could not be built; this failed:\n\n  {shlex.join(command)}\n\n"
            f"It needs a C++20 compiler: g++ 10, clang 12, or newer. CXX=... names another one;\n"
            f"without any on the path, that of the package {ZIG!r} is used."
        )


def build(output: Path) -> None:
    """Compiles all sources and links them to `output`."""
    compiler = system_compiler()
    if not compiler:
        if not importlib.util.find_spec("ziglang"):
            raise SystemExit(f"error: no C++20 compiler was found; install one, or the package {ZIG!r}")
        compiler = ZIG_COMMAND
    flags = [*FLAGS, *DEFINITIONS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
    sources = sorted(NATIVE.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".native-") as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [
                [*compiler, *flags, "-c", str(source), "-o", target]
                for source, target in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        linked = f"{folder}/linked.so"
        link_flags = shlex.split(os.environ.get("LDFLAGS", ""))
        _run([*compiler, *flags, "-shared", *objects, "-o", linked, *link_flags])
        # In one step: processes that have loaded the old one keep it.
        os.replace(linked, output)


class NativeBuildHook(BuildHookInterface[Any]):
    """Puts the extension into the wheel."""

    def dependencies(self) -> list[str]:
        return requirements()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        if version == "editable":
            build(Path(self.root) / "client" / MODULE)
        else:
            self._folder = tempfile.TemporaryDirectory()
            output = Path(self._folder.name) / "native.abi3.so"
            build(output)
            build_data["force_include"][str(output)] = MODULE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--requires":
        print(*requirements())
    else:
        build(Path(sys.argv[1]).absolute())
