"""What the commands share: common options, the connection to the worker, and the output of results and
errors."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import gradwire
from gradwire.errors import GradwireError, RemoteError

__all__ = [
    "ConnectTimeout",
    "Json",
    "Target",
    "connected",
    "output",
    "show_error",
    "unwrapped",
    "with_tls_options",
    "write_json",
]

Target = Annotated[str, typer.Argument(metavar="TARGET", help="The worker: HOST:PORT or unix:PATH.")]

ConnectTimeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="How long to try to reach the worker."),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]


def _tls_file(flag: str, help: str) -> Any:
    return Annotated[str | None, typer.Option(flag, metavar="FILE", help=help, show_default=False)]


_TLS_OPTIONS: dict[str, Any] = {
    "tls": Annotated[
        bool | None,
        typer.Option(
            "--tls/--no-tls",
            help="Whether to use TLS. Default: if one of these is given.",
            show_default=False,
        ),
    ],
    "tls_ca": _tls_file("--tls-ca", "PEM file with the CA of the worker."),
    "tls_cert": _tls_file("--tls-cert", "PEM file with a certificate to show to the worker."),
    "tls_key": _tls_file("--tls-key", "PEM file with the key of that certificate."),
    "tls_server_name": Annotated[
        str | None,
        typer.Option(
            "--tls-server-name",
            metavar="NAME",
            help="For whom the worker's certificate is. Default: the host.",
            show_default=False,
        ),
    ],
}

_tls_options: ContextVar[dict[str, Any]] = ContextVar("tls_options")
"""What was given for these options."""


def with_tls_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of TLS besides its own; `connected` reads them."""

    @wraps(command)
    def with_options(**arguments: Any) -> None:
        _tls_options.set({name: arguments.pop(name) for name in _TLS_OPTIONS})
        command(**arguments)

    signature = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _TLS_OPTIONS.items()
    ]
    parameters = [*signature.parameters.values(), *added]
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_options


def _tls() -> gradwire.Tls | bool | None:
    """What `gradwire.connect` is to be told."""
    options = {name.removeprefix("tls_"): value for name, value in _tls_options.get().items()}
    wanted: bool | None = options.pop("tls")
    given = {name: value for name, value in options.items() if value is not None}
    if wanted is False or not given:
        return wanted
    return replace(gradwire.Tls.from_environment() or gradwire.Tls(), **given)


@contextmanager
def connected(target: str, connect_timeout: float) -> Iterator[gradwire.RemoteWorker]:
    """A handle to a worker for the duration of a command. Ctrl-C exits with code 130, as shells expect."""
    try:
        with gradwire.connect(target, connect_timeout=connect_timeout, tls=_tls()) as worker:
            yield worker
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def unwrapped(doc: str) -> str:
    """A docstring with each paragraph on one line: the help text is wrapped to the terminal's width later."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(doc).split("\n\n"))


def output() -> Console:
    """A console for results on stdout. Made for each command, because it reads the size of the terminal."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # A pipe has no width: without this, rich would wrap lines at 80 columns.
        console.width = 1_000
    return console


def write_json(value: object, indent: int | None = None) -> None:
    """Writes a value as JSON to stdout, without the wrapping and the colors of a console."""
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def show_error(error: GradwireError) -> None:
    """Prints an error as one line on stderr, followed by the worker's traceback if a served function raised
    it."""
    console = Console(stderr=True, highlight=False, markup=False)
    where = f" (on {error.worker})" if error.worker and error.worker not in str(error) else ""
    line = Text.assemble(("error", "bold red"), f": {error}{where}")
    # soft_wrap: only the terminal wraps the line, so programs that read the output get a single line.
    console.print(line, soft_wrap=True)
    if isinstance(error, RemoteError) and error.remote_traceback:
        console.print(Text("Traceback of the worker:", style="bold"), soft_wrap=True)
        console.print(Text(error.remote_traceback.rstrip(), style="dim"), soft_wrap=True)
