"""``gradwire gradcheck``: are a worker's gradients right?"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

import gradwire
from gradwire.cli.common import ConnectTimeout, Target, connected, output

__all__ = ["gradcheck"]

Shapes = Annotated[
    list[str],
    typer.Option("--shape", metavar="N,M,...", help="The shape of an argument; once for each. '' is 0-dim."),
]
Local = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME",
        help="The same function, importable here, to compare with; its parameters must be equal.",
    ),
]


def gradcheck(
    target: Target,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The function to check.")],
    shape: Shapes,
    local: Local = None,
    dtype: Annotated[str, typer.Option(help="Of the arguments.")] = "float64",
    tolerance: Annotated[float, typer.Option(help="The largest error that passes.")] = 1e-6,
    seed: Annotated[int, typer.Option(help="Of the random arguments.")] = 0,
    connect_timeout: ConnectTimeout = 10.0,
) -> None:
    """Compare a worker's gradients with finite differences and, with --local, with local autograd.

    The function is called with random tensors of the given shapes. Exits with 1 on a mismatch.
    """
    inputs = _inputs(shape, dtype, seed)
    reference = None if local is None else _import(local)
    with connected(target, connect_timeout) as worker:
        report = gradwire.gradcheck(
            lambda *args: worker.call(name, *args), inputs, local=reference, tolerance=tolerance, seed=seed
        )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("INPUT", style="bold cyan")
    table.add_column("AGAINST")
    table.add_column("LARGEST GRADIENT", justify="right")
    table.add_column("LARGEST ERROR", justify="right")
    table.add_column("")
    for row in report.rows:
        verdict = Text("ok", style="green") if row.ok else Text("MISMATCH", style="bold red")
        table.add_row(
            row.input, row.reference, f"{row.largest_gradient:.3e}", f"{row.largest_error:.3e}", verdict
        )
    output().print(table)
    if not report:
        raise typer.Exit(1)


def _inputs(shapes: list[str], dtype_name: str, seed: int) -> list[torch.Tensor]:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
        raise typer.BadParameter(f"{dtype_name!r} is no floating-point dtype", param_hint="--dtype")
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for shape in shapes:
        try:
            sizes = [int(size) for size in shape.split(",") if size.strip()]
        except ValueError:
            raise typer.BadParameter(f"{shape!r} is no shape, like 3,4", param_hint="--shape") from None
        inputs.append(torch.randn(sizes, dtype=dtype, generator=generator).requires_grad_())
    return inputs


def _import(spec: str) -> Callable[..., Any]:
    module_name, _, attribute = spec.partition(":")
    sys.path.insert(0, "")  # as the worker does: modules of the working directory
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"{spec}: {error}", param_hint="--local") from None
    if not callable(function):
        raise typer.BadParameter(f"{spec} cannot be called", param_hint="--local")
    result: Callable[..., Any] = function
    return result
