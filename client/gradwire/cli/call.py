"""``gradwire call``: calls a function of a worker and prints its result."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.pretty import Pretty

import gradwire
from gradwire.cli.common import ConnectTimeout, Json, Target, connected, output, write_json

__all__ = ["call"]


def call(
    target: Target,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The function, as `gradwire ls` shows it.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARG|KEY=ARG]...", help="Its arguments, see above.", show_default=False),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "-t", "--timeout", min=0.001, metavar="SECONDS", help="For the whole call.", show_default="none"
        ),
    ] = None,
    json: Json = False,
    connect_timeout: ConnectTimeout = 10.0,
) -> None:
    """Call a function of a worker and print what it returns.

    An ARG is JSON or a Python literal: 3, -0.5, true, None, [1, 2], '{"a": 1}', (1, 2), 1+2j. Anything else
    is a plain string: hello. Write '"3"' for the string 3. KEY=ARG is a keyword argument; quote a string
    that has an equals sign, '"a=b"'.

    t:LIST is a tensor: t:[[1.0,2.0],[3.0,4.0]] or t:0.5; with a dtype, t:float64:[1,2].

    With --json tensors come out as nested lists, tuples and sets as lists, bytes as base64, complex numbers
    as text, and numbers that JSON lacks as "NaN", "Infinity" and "-Infinity".
    """
    from gradwire.cli.values import parse_arguments, to_json

    try:
        args, kwargs = parse_arguments(arguments or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with connected(target, connect_timeout) as worker:
        result = worker.call(name, *args, gradwire.Keywords(**kwargs), timeout=timeout)
    if json:
        write_json(to_json(result))
    else:
        output().print(Pretty(result, expand_all=False))
