"""The command ``gradwire``: inspects workers and calls their functions, from a shell.

Each command is one function in a module of its own. To add a command, write its module and add the function
to `_COMMANDS`; `gradwire.cli.common` has what the commands share. All these modules are imported to show a
page of help, so packages that take long to import, such as torch, are imported inside the functions that need
them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from gradwire import _version
from gradwire.cli import call, certs, cleanup, common, gradcheck, ls, ping, ps
from gradwire.errors import GradwireError

__all__ = ["app", "main"]

_COMMANDS: dict[str, Callable[..., None]] = {
    "ls": ls.ls,
    "call": call.call,
    "ping": ping.ping,
    "ps": ps.ps,
    "cleanup": cleanup.cleanup,
    "gradcheck": gradcheck.gradcheck,
    "certs": certs.certs,
}

_EPILOG = (
    "A TARGET is the address of a worker: HOST:PORT or unix:PATH.\n\n"
    "For workers that speak TLS, GRADWIRE_TLS_CA, GRADWIRE_TLS_CERT, GRADWIRE_TLS_KEY and "
    "GRADWIRE_TLS_SERVER_NAME are the defaults of --tls-ca and so on.\n\n"
    "\b\nExit codes:\n"
    "  0  done\n"
    "  1  the worker could not be reached, refused the call, or the function raised\n"
    "  2  wrong usage of the command line\n"
    "130  interrupted with Ctrl-C"
)

app = typer.Typer(
    name="gradwire",
    help="Looks at gradwire workers and calls their functions.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables truncate the names of options in a terminal of 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(_version.description("gradwire"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


for _name, _command in _COMMANDS.items():
    # Words that look like unknown options may be arguments of a call: -1, -0.5. `call` itself refuses other
    # words.
    app.command(
        _name,
        help=common.unwrapped(_command.__doc__ or ""),
        context_settings={"ignore_unknown_options": _name == "call"},
    )(_command if _name == "certs" else common.with_tls_options(_command))


def main() -> None:
    """The entry point of the command ``gradwire``."""
    # gRPC would write lines of its own to stderr, for each handshake that fails, say.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        app(prog_name="gradwire")
    except GradwireError as error:
        common.show_error(error)
        sys.exit(1)
