"""``gradwire cleanup``: makes a worker drop a context."""

from __future__ import annotations

from typing import Annotated

import typer

from gradwire.cli.common import ConnectTimeout, Target, connected, output

__all__ = ["cleanup"]

ContextName = Annotated[str, typer.Argument(metavar="ID", help="The context, as `gradwire ps` names it.")]


def cleanup(target: Target, id: ContextName, connect_timeout: ConnectTimeout = 10.0) -> None:
    """Make a worker let go of a context.

    Its gradients go, and the results kept for backward. Whoever still uses the context gets an error that
    says so. Exits with 1 if there is no such context.
    """
    with connected(target, connect_timeout) as worker:
        try:
            found = worker.cleanup(id)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    if not found:
        output().print(f"{target} holds no context {id}")
        raise typer.Exit(1)
    output().print(f"{target} let go of context {id}")
