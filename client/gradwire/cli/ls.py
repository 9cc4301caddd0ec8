"""``gradwire ls``: lists the functions and classes that a worker serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gradwire.cli.common import ConnectTimeout, Json, Target, connected, output, write_json

if TYPE_CHECKING:
    from gradwire import FunctionInfo

__all__ = ["ls"]


def ls(target: Target, json: Json = False, connect_timeout: ConnectTimeout = 10.0) -> None:
    """List what a worker serves: names, signatures and what they do."""
    from gradwire.api.function_info import function_info

    with connected(target, connect_timeout) as worker:
        description = worker.describe()
    functions = [function_info(function) for function in description.functions]
    if json:
        write_json(
            {
                "name": description.name,
                "target": target,
                "version": description.version,
                "torch_version": description.torch_version,
                "devices": list(description.devices),
                "functions": [_as_json(function) for function in functions],
            },
            indent=2,
        )
        return

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("NAME", style="bold cyan", no_wrap=True)
    table.add_column("SIGNATURE", overflow="fold")
    table.add_column("DOES", style="dim", overflow="fold")
    for name, function in _rows(functions):
        table.add_row(name, _signature(function), _first_line(function.doc))
    console = output()
    console.print(
        Text.assemble(
            (description.name, "bold"),
            (f" at {target}, gradwire {description.version}, torch {description.torch_version}", "dim"),
        )
    )
    console.print(table)


def _rows(functions: Iterable[FunctionInfo]) -> Iterator[tuple[str, FunctionInfo]]:
    for function in functions:
        yield function.name, function
        for name, method in function.methods.items():
            yield f"  .{name}", method


def _signature(function: FunctionInfo) -> Text:
    prefix = "" if function.kind == "function" else f"{function.kind} "
    return Text.assemble((prefix, "magenta"), str(function.signature))


def _first_line(doc: str) -> str:
    return doc.strip().partition("\n")[0]


def _as_json(function: FunctionInfo) -> dict[str, object]:
    return {
        "name": function.name,
        "kind": function.kind,
        "signature": str(function.signature),
        "doc": function.doc,
        "parameters": [
            {
                "name": parameter.name,
                "kind": parameter.kind.name.lower(),
                "annotation": None if parameter.annotation is parameter.empty else repr(parameter.annotation),
                "default": None if parameter.default is parameter.empty else repr(parameter.default),
                "required": parameter.default is parameter.empty
                and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD),
            }
            for parameter in function.signature.parameters.values()
        ],
        "methods": [_as_json(method) for method in function.methods.values()],
    }
