"""``gradwire gradcheck``: checks the gradients of a worker's function, or the error of a codec."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

import gradwire
from gradwire.cli.common import ConnectTimeout, Target, connected, output

if TYPE_CHECKING:
    import torch

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
Codecs = Annotated[
    list[str] | None,
    typer.Option(
        "--codec",
        metavar="NAME",
        help="Instead, show the error of a codec (fp16, bf16, int8, zstd) for both directions, or of "
        "forward=NAME, backward=NAME.",
    ),
]


def gradcheck(
    target: Target,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The function to check.")],
    shape: Shapes,
    local: Local = None,
    dtype: Annotated[str, typer.Option(help="Of the arguments.")] = "float64",
    codec: Codecs = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="The largest error that passes; with --codec the relative one.",
            show_default="1e-6; none with --codec",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random arguments.")] = 0,
    connect_timeout: ConnectTimeout = 10.0,
) -> None:
    """Compare a worker's gradients with finite differences.

    With --local they are compared with those of local autograd, too. The function is called with random
    tensors of the given shapes. Exits with 1 on a mismatch.

    With --codec it is called twice instead, with compressed tensors and without, and the difference is shown.
    """
    inputs = _inputs(shape, dtype, seed)
    if codec:
        _show_codec_error(target, name, inputs, _compression(codec), tolerance, seed, connect_timeout)
        return
    reference = None if local is None else _import(local)
    with connected(target, connect_timeout) as worker:
        report = gradwire.gradcheck(
            lambda *args: worker.call(name, *args),
            inputs,
            local=reference,
            tolerance=1e-6 if tolerance is None else tolerance,
            seed=seed,
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


def _compression(codecs: list[str]) -> gradwire.Compression:
    chosen: dict[str, str] = {}
    for text in codecs:
        direction, separator, codec = text.rpartition("=")
        directions = [direction] if separator else ["forward", "backward"]
        if not {"forward", "backward"}.issuperset(directions):
            raise typer.BadParameter(f"{direction!r} is neither forward nor backward", param_hint="--codec")
        chosen.update(dict.fromkeys(directions, codec))
    try:
        return gradwire.Compression(chosen.get("forward"), chosen.get("backward"))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--codec") from None


def _show_codec_error(
    target: str,
    name: str,
    inputs: list[torch.Tensor],
    compression: gradwire.Compression,
    tolerance: float | None,
    seed: int,
    connect_timeout: float,
) -> None:
    from gradwire.wire import COMPRESS_FROM

    with connected(target, connect_timeout) as worker:
        report = gradwire.codec_error(lambda *args: worker.call(name, *args), inputs, compression, seed=seed)
        saved = worker.traffic().saved
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("TENSOR", style="bold cyan")
    for column in ("SIZE", "LARGEST", "LARGEST ERROR", "RELATIVE ERROR"):
        table.add_column(column, justify="right")
    for row in report.rows:
        errors = (row.largest, row.largest_error, row.relative_error)
        table.add_row(row.tensor, decimal(row.bytes), *(f"{number:.3e}" for number in errors))
    output().print(table)
    if saved:
        output().print(f"{decimal(saved)} saved by {compression}")
    else:
        output().print(
            f"Nothing was compressed: tensors of less than {COMPRESS_FROM} bytes, and those that a codec "
            "does not make smaller, travel as they are."
        )
    # Written with `not`, because comparisons with NaN are false, and a NaN must fail.
    if tolerance is not None and not report.relative_error <= tolerance:
        raise typer.Exit(1)


def _inputs(shapes: list[str], dtype_name: str, seed: int) -> list[torch.Tensor]:
    import torch

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
    sys.path.insert(0, "")  # as the worker does, so that modules of the working directory can be imported
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"{spec}: {error}", param_hint="--local") from None
    if not callable(function):
        raise typer.BadParameter(f"{spec} cannot be called", param_hint="--local")
    result: Callable[..., Any] = function
    return result
