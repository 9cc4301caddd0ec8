"""A progress bar for people, and nothing for logs."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

__all__ = ["ByteProgress"]


class ByteProgress:
    """Bytes done of a total that may grow. Shown if `wanted`, or if it is None and stderr is a terminal."""

    def __init__(self, what: str, wanted: bool | None) -> None:
        self._what = what
        self._wanted = sys.stderr.isatty() if wanted is None else wanted
        self._total = 0

    def __enter__(self) -> Self:
        if self._wanted:
            # Imported when needed: it takes a while, and most processes never show a bar.
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
            self._task = self._bar.add_task(self._what, total=None)
        return self

    def expect(self, size: int) -> None:
        """There is more to do than was known."""
        self._total += size
        if self._wanted:
            self._bar.update(self._task, total=self._total)

    def advance(self, size: int) -> None:
        if self._wanted:
            self._bar.advance(self._task, size)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wanted:
            self._bar.stop()
