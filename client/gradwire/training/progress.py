"""A progress bar on stderr, shown by default only if stderr is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

__all__ = ["ByteProgress"]


class ByteProgress:
    """Shows how many of a number of bytes are done; the number may grow.

    The bar is shown if `wanted`, or if `wanted` is None and stderr is a terminal.
    """

    def __init__(self, label: str, wanted: bool | None) -> None:
        self._label = label
        self._wanted = sys.stderr.isatty() if wanted is None else wanted
        self._total = 0

    def __enter__(self) -> Self:
        if self._wanted:
            # Imported here, because importing rich takes a while, and most processes never show a bar.
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(binary_units=True),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=None)
        return self

    def expect(self, size: int) -> None:
        """Adds bytes to the total."""
        self._total += size
        if self._wanted:
            self._bar.update(self._task, total=self._total)

    def advance(self, size: int) -> None:
        """Adds bytes that are done."""
        if self._wanted:
            self._bar.advance(self._task, size)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wanted:
            self._bar.stop()
