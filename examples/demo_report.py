"""What the demo shows: progress while it trains, both runs side by side, and a picture."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from torch import nn

import gradwire as gw

console = Console(highlight=False)


class Run:
    """One training run: its numbers, and the line that shows them while it goes on."""

    def __init__(self, name: str, epochs: int, samples: int, workers: Sequence[gw.RemoteWorker] = ()) -> None:
        self.name = name
        self.epochs = epochs
        self.losses: list[float] = []
        """One for each step."""
        self.accuracies: list[float] = []
        """One for each epoch."""
        self.seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
        self._samples = 0
        self._workers = workers
        self._sent_before = self._bytes_sent()
        self._started = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(None), TextColumn("{task.fields[numbers]}"))
        self._bar = Progress(*columns, console=console, expand=True)
        self._task = self._bar.add_task(name, total=epochs * samples, numbers="")

    def __enter__(self) -> Self:
        # A bar that moves is for terminals. In a container's log, `add_epoch` prints lines instead.
        if console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if console.is_terminal:
            self._bar.stop()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def add_step(self, loss: float, samples: int) -> None:
        self.losses.append(loss)
        self._samples += samples
        self._bar.update(self._task, advance=samples, numbers=str(self))

    def add_epoch(self, accuracy: float) -> None:
        self.accuracies.append(accuracy)
        self._bar.update(self._task, numbers=str(self))
        done = len(self.accuracies)
        if not console.is_terminal and (done % 3 == 0 or done == self.epochs):
            console.print(f"{self.name}  epoch {done:2}  {self}")

    def __str__(self) -> str:
        elapsed = time.perf_counter() - self._started
        accuracy = f"{self.accuracies[-1]:.3f}" if self.accuracies else "  -  "
        traffic = f"{decimal(int((self._bytes_sent() - self._sent_before) / elapsed)):>7}/s"
        return (
            f"loss {self.losses[-1]:.4f}  accuracy {accuracy}  {self._samples / elapsed:6,.0f} samples/s"
            f"  {traffic if self._workers else '':9}"
        )

    def _bytes_sent(self) -> int:
        return sum(worker.traffic().total for worker in self._workers)


def show_parts(model: nn.Sequential) -> None:
    """Where each part of the model is."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", style="bold cyan")
    table.add_column("where")
    table.add_column("parameters", justify="right")
    for part in model:
        if isinstance(part, gw.nn.RemoteModule):
            where = f"{part.worker.name} at {part.worker.target}"
            table.add_row(part.ref.class_name, where, f"{part.num_parameters():,}")
        else:
            count = sum(parameter.numel() for parameter in part.parameters())
            table.add_row(type(part).__name__, "here, with the images and the labels", f"{count:,}")
    console.print(table)


def show_side_by_side(split: Run, whole: Run) -> None:
    """The end of each epoch of both runs, and how far their losses were apart in it."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", justify="right", style="bold cyan")
    for name in ("loss: split", "whole", "max. difference", "accuracy: split", "whole"):
        table.add_column(name, justify="right")
    steps = len(split.losses) // split.epochs
    for epoch in range(split.epochs):
        last = (epoch + 1) * steps - 1
        table.add_row(
            str(last + 1),
            f"{split.losses[last]:.7f}",
            f"{whole.losses[last]:.7f}",
            f"{max(differences(split, whole)[epoch * steps : last + 1]):.1g}",
            f"{split.accuracies[epoch]:.3f}",
            f"{whole.accuracies[epoch]:.3f}",
        )
    console.print(table)


def differences(split: Run, whole: Run) -> list[float]:
    """How far the losses of two runs are apart, at every step."""
    return [abs(a - b) for a, b in zip(split.losses, whole.losses, strict=True)]


def check(right: bool, what: str) -> bool:
    """Says whether something is as it should be."""
    console.print(f"[green]✓[/green] {what}" if right else f"[red]✗ {what}[/red]")
    return right


# -- the picture

SPLIT, WHOLE = "#7fb3e6", "#1b2a41"
PHASES = {"forward": "#4c78a8", "backward": "#f58518", "step": "#54a24b"}
"""The colors of both runs, and of where their time goes."""


def draw(path: Path, split: Run, whole: Run) -> None:
    """Loss and accuracy of both runs, and where their time went."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    largest = max(differences(split, whole))
    figure.suptitle(
        f"The same model split over two workers and whole; largest difference in loss: {largest:.1g}"
    )
    loss, accuracy, time_per_step = figure.subplots(1, 3)

    steps = range(1, len(split.losses) + 1)
    loss.semilogy(steps, split.losses, color=SPLIT, linewidth=4, label="split")
    loss.semilogy(steps, whole.losses, color=WHOLE, linewidth=1, label="whole")
    loss.set(title="training loss", xlabel="step")

    epochs = range(1, split.epochs + 1)
    accuracy.plot(epochs, split.accuracies, color=SPLIT, linewidth=5, label="split")
    accuracy.plot(epochs, whole.accuracies, color=WHOLE, linewidth=1, marker="o", markersize=4, label="whole")
    accuracy.set(title="test accuracy", xlabel="epoch")
    accuracy.xaxis.set_major_locator(MaxNLocator(integer=True))

    runs = (split, whole)
    below = [0.0, 0.0]
    for phase, color in PHASES.items():
        taken = [1000 * run.seconds[phase] / len(run.losses) for run in runs]
        bars = time_per_step.bar([run.name for run in runs], taken, 0.55, below, color=color, label=phase)
        labels = [f"{ms:.1f}" for ms in taken]
        time_per_step.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
        below = [bottom + ms for bottom, ms in zip(below, taken, strict=True)]
    time_per_step.set(title="time per step, in milliseconds")

    for axes in (loss, accuracy, time_per_step):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="lower right" if axes is accuracy else "upper right")
    figure.savefig(path, dpi=120, format="png")
