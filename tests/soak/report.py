"""What a soak found, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tests.soak.checks import Remains
from tests.soak.run import Outcome, logged

__all__ = ["print_report"]


def print_report(outcome: Outcome, remains: Sequence[Remains], console: Console) -> None:
    size, account = outcome.size, outcome.account
    console.rule(f"soak: {size.seconds:g} s, seed {size.seed}")
    operations = Table("what", "times", "slowest", title="What clients did", title_justify="left")
    for kind, times in sorted(account.operations.items()):
        operations.add_row(kind.replace("_", " "), f"{times:,}", f"{account.slowest[kind]:.2f} s")
    console.print(operations)
    answered = len(account.done)
    _print_numbers(
        console,
        "Together",
        {
            **{key: account.counts[key] for key in sorted(account.counts)},
            "calls counted on the workers": len(account.begun),
            "of them answered, so run exactly once": answered,
            "of them cancelled, timed out, or of a killed client: run at most once": len(account.begun)
            - answered,
            "clients started": outcome.clients_started,
            "clients killed": outcome.clients_killed,
        },
    )
    _print_numbers(
        console,
        "Faults",
        {
            **dict(sorted(outcome.faults.items())),
            "links cut, as workers noticed": logged(outcome.workers, "was cut; its lease runs"),
            "links between workers cut": logged(outcome.workers, "was cut:"),
            "leases that ran out": logged(outcome.workers, "ran out"),
        },
    )
    workers = Table("worker", "memory first", "most", "last", "threads most", "last", "left", title="Workers")
    workers.title_justify = "left"
    for index, (worker, left) in enumerate(zip(outcome.workers, remains, strict=True)):
        workers.add_row(
            str(index),
            *(
                f"{n / 1e6:.0f} MB"
                for n in (worker.resident_at_first, worker.resident_at_most, left.resident)
            ),
            str(worker.threads_at_most),
            str(left.threads),
            ", ".join(f"{number} {what}" for what, number in left.held.items()) or "nothing",
        )
    console.print(workers)
    for violation in outcome.violations:
        # As text: a traceback may have brackets that rich would take for markup.
        console.print(Text(violation, style="red"))
    if outcome.violations:
        console.print(Text(f"{len(outcome.violations)} violations", style="bold red"))
    else:
        console.print(Text("all results exact, every call once, nothing left", style="bold green"))


def _print_numbers(console: Console, title: str, numbers: Mapping[str, int]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for what, number in numbers.items():
        table.add_row(what, f"{number:,}")
    console.print(table)
