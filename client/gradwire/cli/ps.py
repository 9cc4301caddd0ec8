"""``gradwire ps``: lists the contexts that a worker holds."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from gradwire.cli.common import ConnectTimeout, Json, Target, connected, output, write_json

__all__ = ["ps"]


def ps(target: Target, json: Json = False, connect_timeout: ConnectTimeout = 10.0) -> None:
    """List the contexts that a worker holds, and for whom.

    Each with its owner, its age, and the size of the results and gradients in it. With --json also the
    processes that use the worker. Modules and other objects are not listed yet.
    """
    from google.protobuf.json_format import MessageToDict

    with connected(target, connect_timeout) as worker:
        held = worker.inspect()
    if json:
        write_json(
            MessageToDict(held, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
            indent=2,
        )
        return
    console = output()
    clients = sum(client.connected for client in held.clients)
    saved = sum(client.saved_bytes for client in held.clients)
    console.print(
        Text.assemble(
            (held.name, "bold"),
            (
                f" at {target}, up {_age(held.uptime_seconds)}, {decimal(held.resident_bytes)} resident, "
                f"{held.calls} calls, {clients} clients connected"
                + (f", {decimal(saved)} saved by compression" if saved else ""),
                "dim",
            ),
        )
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("CONTEXT", style="bold cyan", no_wrap=True)
    table.add_column("OWNER", overflow="fold")
    for column in ("AGE", "RESULTS", "ARGUMENTS", "GRADIENTS", "SIZE"):
        table.add_column(column, justify="right")
    for context in sorted(held.contexts, key=lambda context: -context.age_seconds):
        table.add_row(
            context.id,
            context.owner or "(not connected)",
            _age(context.age_seconds),
            str(context.results),
            str(context.arguments),
            str(context.gradients),
            decimal(context.bytes),
        )
    console.print(table if held.contexts else Text("It holds no contexts.", style="dim"))


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
