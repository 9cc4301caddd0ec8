"""What the commands share: the target, the connection, and how results and errors look."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

import gradwire
from gradwire.errors import GradwireError, RemoteError

__all__ = ["ConnectTimeout", "Json", "Target", "connected", "output", "show_error", "unwrapped", "write_json"]

Target = Annotated[str, typer.Argument(metavar="TARGET", help="The worker: HOST:PORT or unix:PATH.")]

ConnectTimeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="How long to try to reach the worker."),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]


@contextmanager
def connected(target: str, connect_timeout: float) -> Iterator[gradwire.RemoteWorker]:
    """A worker for the length of a command. Ctrl-C ends the command with 130, as shells expect."""
    try:
        with gradwire.connect(target, connect_timeout=connect_timeout) as worker:
            yield worker
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def unwrapped(doc: str) -> str:
    """A docstring with a line per paragraph: as a help text it is folded again, to the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(doc).split("\n\n"))


def output() -> Console:
    """Where results go. Made when needed: it looks at the terminal as it is then."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # A pipe has no width: never fold lines for it at 80 columns.
        console.width = 1_000
    return console


def write_json(value: object, indent: int | None = None) -> None:
    """Prints JSON as it is, on stdout."""
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def show_error(error: GradwireError) -> None:
    """One line on stderr; for an error raised by a served function, the traceback of the worker follows."""
    console = Console(stderr=True, highlight=False, markup=False)
    where = f" (on {error.worker})" if error.worker and error.worker not in str(error) else ""
    line = Text.assemble(("error", "bold red"), f": {error}{where}")
    # soft_wrap: the terminal folds it, so that it stays one line for whatever reads it.
    console.print(line, soft_wrap=True)
    if isinstance(error, RemoteError) and error.remote_traceback:
        console.print(Text("Traceback of the worker:", style="bold"), soft_wrap=True)
        console.print(Text(error.remote_traceback.rstrip(), style="dim"), soft_wrap=True)
