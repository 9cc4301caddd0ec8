"""Two workers, a few calls: ``python examples/calls.py``.

Starts two daemons on free ports of this machine, calls functions on them and shows what came back. With
GRADWIRE_WORKERS="host-a:50051,host-b:50051" it uses two that run already and serve calls_functions.

Exits with 1 if any result is wrong.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import torch
from rich.console import Console
from rich.panel import Panel
from rich.pretty import pretty_repr
from rich.syntax import Syntax
from rich.text import Text

import gradwire as gw
from local_workers import workers_for

console = Console(highlight=False)
failures: list[str] = []


# -- showing


def title(text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def show(code: str, result: str = "") -> None:
    highlighted = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(code)
    highlighted.rstrip()
    console.print(Text.assemble(("  >>> ", "dim"), highlighted))
    for line in result.splitlines():
        console.print(f"      {line}", markup=False)


def check(right: bool, what: str) -> None:
    if right:
        console.print(f"  [green]✓[/green] {what}")
    else:
        console.print(f"  [red]✗ {what}[/red]")
        failures.append(what)


# -- the tour


def plain_calls(alice: gw.RemoteWorker) -> None:
    title("A function in another process")
    greeting = alice.hello("world")
    show('alice.hello("world")', repr(greeting))
    here = f"{socket.gethostname()}:{os.getpid()}"
    check(greeting.startswith("hello world, this is ") and here not in greeting, "ran in another process")


def tensors(alice: gw.RemoteWorker) -> None:
    title("Tensors go and come back")
    x = torch.arange(12.0).reshape(4, 3)
    response = alice.standardize(x)
    show('alice.standardize(x)["result"]', str(response["result"]))
    expected = (x - x.mean(dim=0)) / x.std(dim=0)
    check(torch.equal(response["result"], expected), "bit for bit what this process computes")


def nested(alice: gw.RemoteWorker, bob: gw.RemoteWorker) -> None:
    title("Workers call each other")
    hops = alice.bounce(6, alice.target, bob.target)
    show("alice.bounce(6, alice.target, bob.target)", pretty_repr(hops, max_width=70, max_length=3))
    check(hops == hops[:2] * 3 and hops[0] != hops[1], "six hops, back and forth between two processes")


def fan_out(alice: gw.RemoteWorker, bob: gw.RemoteWorker) -> None:
    title("Many calls at once")
    started = time.perf_counter()
    futures = [worker.call_async("nap", 0.25) for worker in (alice, bob) for _ in range(10)]
    results = [future.result(30) for future in futures]
    took = time.perf_counter() - started
    show(
        '[w.call_async("nap", 0.25) for w in (alice, bob) for _ in range(10)]', f"20 results in {took:.2f} s"
    )
    check(
        results == [0.25] * 20 and took < 2.5, "20 naps of 0.25 s side by side, not 5 s one after the other"
    )


def errors(bob: gw.RemoteWorker) -> None:
    title("An error there is an error here")
    show("bob.mean_of([])")
    try:
        bob.mean_of([])
    except ValueError as error:
        traceback: str = getattr(error, "remote_traceback", "")
        shown = Text(traceback.rstrip(), style="dim")
        console.print(
            Panel(shown, title=Text(str(error), style="red"), title_align="left", border_style="red")
        )
        check(
            "calls_functions.py" in traceback,
            "caught with `except ValueError`, with its traceback",
        )
    else:
        check(False, "bob.mean_of([]) should have raised")


def large(alice: gw.RemoteWorker) -> None:
    title("A large tensor")
    x = torch.rand(16_000_000)
    megabytes = x.numel() * x.element_size() / 1e6
    best = float("inf")
    same = True
    # The first time pays for fresh memory at both ends.
    for _ in range(3):
        started = time.perf_counter()
        back = alice.echo(x)
        best = min(best, time.perf_counter() - started)
        same = same and torch.equal(back, x)
    rate = 2 * megabytes / best
    show(
        "alice.echo(torch.rand(16_000_000))",
        f"{megabytes:.0f} MB there and back in {best:.2f} s: {rate:,.0f} MB/s",
    )
    check(same, "came back bit for bit")


def main() -> int:
    given = os.environ.get("GRADWIRE_WORKERS", "")
    with workers_for("calls_functions", given, names=("alice", "bob")) as (first, second):
        with gw.connect(first, connect_timeout=60) as alice, gw.connect(second, connect_timeout=60) as bob:
            for worker in (alice, bob):
                console.print(f"[bold cyan]{worker.name}[/bold cyan] at {worker.target}")
            served = ", ".join(function.name for function in alice.functions())
            console.print(f"[dim]each serves {served}[/dim]")
            plain_calls(alice)
            tensors(alice)
            nested(alice, bob)
            fan_out(alice, bob)
            errors(bob)
            large(alice)
    console.print()
    if failures:
        console.print(f"[bold red]{len(failures)} results were wrong[/bold red]")
        return 1
    console.print("[bold green]All results were right.[/bold green]")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
