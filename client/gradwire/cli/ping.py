"""``gradwire ping``: measures how long a round trip to a worker takes."""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import typer

from gradwire.cli.common import ConnectTimeout, Target, connected, output
from gradwire.errors import GradwireError

__all__ = ["ping"]


def ping(
    target: Target,
    count: Annotated[
        int | None,
        typer.Option("-c", "--count", min=1, help="How many to send.", show_default="until Ctrl-C"),
    ] = None,
    interval: Annotated[
        float, typer.Option("-i", "--interval", min=0, metavar="SECONDS", help="From one to the next.")
    ] = 1.0,
    timeout: Annotated[
        float,
        typer.Option("-t", "--timeout", min=0.001, metavar="SECONDS", help="How long to wait for each."),
    ] = 5.0,
    connect_timeout: ConnectTimeout = 10.0,
) -> None:
    """Measure round trips to a worker, like ping. Exits with 1 if there was no response."""
    console = output()
    sent = 0
    times: list[float] = []
    with connected(target, connect_timeout) as worker:
        console.print(f"PING {worker.name} ({target})")
        try:
            while count is None or sent < count:
                if sent:
                    time.sleep(interval)
                sent += 1
                try:
                    seconds = worker.ping(timeout=timeout)
                except GradwireError as error:
                    console.print(f"no response: seq={sent} {error}", style="red", soft_wrap=True)
                else:
                    times.append(seconds)
                    console.print(
                        f"response from {worker.name}: seq={sent} time={_ms(seconds)} ms", soft_wrap=True
                    )
        except KeyboardInterrupt:
            # Ctrl-C is the usual way to end ping, so it prints the statistics and does not exit with 130.
            console.print()
    console.print(f"--- {target} ping statistics ---")
    lost = sent - len(times)
    console.print(f"{sent} sent, {len(times)} received, {100 * lost / max(sent, 1):.0f}% lost")
    if not times:
        raise typer.Exit(1)
    summary = (min(times), statistics.fmean(times), max(times), statistics.median(times))
    console.print(f"round trip min/avg/max/p50 = {'/'.join(map(_ms, summary))} ms")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f}"
