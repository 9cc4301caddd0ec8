"""Fixtures for tests with real processes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest
from tests.integration.daemons import Daemon


class Launch(Protocol):
    """Starts a daemon that serves a module with this source, and returns once it serves."""

    def __call__(
        self,
        module_source: str,
        *extra_args: str,
        bind: str | None = "127.0.0.1:0",
        env: Mapping[str, str] | None = None,
    ) -> Daemon: ...


def _launcher(folder: Path, daemons: list[Daemon]) -> Launch:
    def launch(
        module_source: str,
        *extra_args: str,
        bind: str | None = "127.0.0.1:0",
        env: Mapping[str, str] | None = None,
    ) -> Daemon:
        place = folder / f"daemon{len(daemons)}"
        place.mkdir()
        (place / "served.py").write_text(textwrap.dedent(module_source))
        binding = [] if bind is None else ["--bind", bind]
        daemon = Daemon(["served", *binding, *extra_args], cwd=place, env=env)
        daemons.append(daemon)
        return daemon.wait_until_ready()

    return launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """``launch(module_source, *extra_args)`` starts a daemon; all of them end with the test."""
    daemons: list[Daemon] = []
    yield _launcher(tmp_path, daemons)
    for daemon in daemons:
        daemon.stop()


@pytest.fixture(scope="module")
def module_launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """The same for daemons that all tests of a module share."""
    daemons: list[Daemon] = []
    yield _launcher(tmp_path_factory.mktemp("daemons"), daemons)
    for daemon in daemons:
        daemon.stop()
