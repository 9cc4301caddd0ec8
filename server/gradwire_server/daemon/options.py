"""How the options of ``gradwire-server serve`` are declared: flag, environment variable, key of the config
file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer

from gradwire_server.daemon import config

__all__ = ["checked", "option", "size_option", "use_config"]

T = TypeVar("T")


def checked(check: Callable[[object], T]) -> Callable[[object], T]:
    """A check of `config` as a parser of the command line, where a wrong value is a usage error."""

    def parse(value: object) -> T:
        try:
            return check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of --config: takes the values in the file as the defaults of the other options.

    The option must be eager, so that this runs before the other options look for their defaults.
    """
    if path is not None and not context.resilient_parsing:
        context.default_map = config.read_config(path)
    return path


def option(
    setting: str,
    help: str,
    check: Callable[[object], object] | None = None,
    metavar: str = "",
    *,
    show_default: bool = True,
) -> Any:
    """An option with the setting's name as flag and as environment variable. Without a check it is a
    switch."""
    flag = f"--{setting}/--no-{setting}" if check is None else f"--{setting}"
    return typer.Option(
        flag,
        envvar=config.environment_variable(setting),
        help=help,
        show_envvar=False,  # the epilog has the rule; a line for each option would double the page
        metavar=metavar,
        parser=None if check is None else checked(check),
        show_default=show_default,
    )


def size_option(setting: str, help: str, default: int) -> Any:
    """An option for a number of bytes."""
    shown = f"{help}  [default: {config.shown_size(default)}]"
    return option(setting, shown, config.byte_size, "SIZE", show_default=False)
