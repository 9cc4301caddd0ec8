"""The command ``gradwire-server``: a worker as a daemon."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import torch
import typer

from gradwire import __version__
from gradwire_server import config, loading, logs
from gradwire_server.errors import DaemonError, LoadFailed
from gradwire_server.worker import Worker

__all__ = ["app", "main"]

_log = logging.getLogger("gradwire_server")

_T = TypeVar("_T")

_EXIT_SECONDS = 2.0
"""What Python gets to end its threads and run exit handlers, after the grace period."""

_EPILOG = """
Every option can also be given as an environment variable, named above, or in a TOML file: the key of the same name in
the table [bold]\\[serve][/bold], e.g. [cyan]lost-after = 5[/cyan]. An option wins over a variable, a variable over the file.
Variables that hold several values separate them with spaces.

SIGTERM and SIGINT let calls in flight finish for --grace seconds and exit with 0; a second signal exits at once.

[bold]Exit codes[/bold]

0  stopped by a signal

1  an error of gradwire itself

2  wrong usage of the command line or of a variable

3  an address cannot be listened on, for example a port in use

4  a module cannot be imported, or lacks the object

5  a module exposes nothing

6  the config file cannot be used

130, 143  stopped by a second SIGINT, SIGTERM
"""

app = typer.Typer(
    name="gradwire-server",
    help="Serves Python functions, classes and torch modules to other processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire-server {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def _checked(check: Callable[[object], _T]) -> Callable[[object], _T]:
    """A check of `config` as a parser of the command line, where what is wrong is a usage error."""

    def parse(value: object) -> _T:
        try:
            return check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def _use_config(context: typer.Context, path: Path | None) -> Path | None:
    # Eager, so that it runs before the other options look for their defaults.
    if path is not None and not context.resilient_parsing:
        context.default_map = config.read_config(path)
    return path


def _option(
    setting: str, help: str, check: Callable[[object], object] | None = None, metavar: str = ""
) -> Any:
    """An option with the setting's name as flag and as environment variable."""
    flag = f"--{setting}/--no-{setting}" if check is None else f"--{setting}"
    return typer.Option(
        flag,
        envvar=config.environment_variable(setting),
        help=help,
        metavar=metavar or None,
        parser=None if check is None else _checked(check),
    )


@app.command(epilog=_EPILOG)
def serve(
    modules: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE[:OBJECT]...",
            envvar=config.environment_variable("modules"),
            parser=_checked(config.module_spec),
            help="Modules of which everything exposed is served, and objects to serve as they are. "
            "The key in the config file is 'modules'.",
            show_default=False,
        ),
    ],
    bind: Annotated[
        list[str],
        _option(
            "bind",
            "Address to listen on: HOST:PORT or unix:PATH; repeatable. Port 0 takes a free one.",
            config.bind_address,
            "ADDRESS",
        ),
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer copies it
    name: Annotated[
        str | None,
        _option(
            "name",
            "What the worker is called in logs and errors. [dim]Default: made from the host's name.[/dim]",
            config.worker_name,
            "TEXT",
        ),
    ] = None,
    threads: Annotated[
        int,
        _option(
            "threads",
            "Calls of other processes that run at a time; nested calls are not counted.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = 64,
    torch_threads: Annotated[
        int | None,
        _option(
            "torch-threads",
            "Threads of one torch operation. [dim]Default: torch's own, the number of cores.[/dim]",
            config.positive_integer,
            "INTEGER",
        ),
    ] = None,
    lease: Annotated[
        float,
        _option(
            "lease",
            "How long to keep what a client holds here after its link broke.",
            config.positive_seconds,
            "SECONDS",
        ),
    ] = 30.0,
    lost_after: Annotated[
        float,
        _option(
            "lost-after",
            "How long another process may be out of reach before it counts as lost.",
            config.positive_seconds,
            "SECONDS",
        ),
    ] = 10.0,
    grace: Annotated[
        float,
        _option(
            "grace", "How long calls in flight may take to finish on shutdown.", config.seconds, "SECONDS"
        ),
    ] = 10.0,
    max_message_bytes: Annotated[
        int | None,
        _option(
            "max-message-bytes",
            "The largest request to accept, as in 64MB or 1GiB.",
            config.byte_size,
            "SIZE",
        ),
    ] = None,
    health: Annotated[bool, _option("health", "Serve the standard gRPC health service.")] = True,
    reflection: Annotated[
        bool, _option("reflection", "Serve gRPC reflection, for tools such as grpcurl.")
    ] = True,
    log_level: Annotated[
        str,
        _option(
            "log-level", "The least that is logged: debug, info, warning or error.", config.log_level, "LEVEL"
        ),
    ] = "info",
    log_format: Annotated[
        str,
        _option(
            "log-format",
            "text, json, or auto: text on a terminal, JSON lines elsewhere.",
            config.log_format,
            "FORMAT",
        ),
    ] = "auto",
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar=config.environment_variable("config"),
            callback=_use_config,
            is_eager=True,
            metavar="FILE",
            help="TOML file with defaults for these options.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve what Python modules expose.

    Modules are loaded from the working directory. In MODULE, everything marked with @gradwire_server.expose is
    served; MODULE:OBJECT serves just that object, marked or not.
    """
    logs.configure(log_level, log_format)
    # Python hands over between threads every 5 ms by default: a busy function would delay every reply by tens of
    # milliseconds. At 0.5 ms small replies overtake it.
    sys.setswitchinterval(0.0005)
    if torch_threads is not None:
        torch.set_num_threads(torch_threads)

    signals = _Signals()
    loading.use_working_directory()
    with signals.ending_at_once():
        served = loading.load_all(modules)
    optional = {} if max_message_bytes is None else {"max_message_bytes": max_message_bytes}
    try:
        worker = Worker(
            *served,
            bind=bind,
            name=name,
            threads=threads,
            lease=lease,
            lost_after=lost_after,
            grace=grace,
            health=health,
            reflection=reflection,
            **optional,
        )
    except (TypeError, ValueError) as error:
        # Two things of one name, or a thing that cannot be called.
        raise LoadFailed(str(error)) from error
    worker.start()
    _log.info(
        "%s serves %s on %s",
        worker.name,
        ", ".join(worker.functions),
        ", ".join(worker.addresses),
        extra={
            "event": "ready",
            "worker": worker.name,
            "addresses": list(worker.addresses),
            "functions": list(worker.functions),
            "pid": os.getpid(),
        },
    )
    received = signals.wait()
    _log.info(
        "%s: finishing calls in flight, for %g s at most", received.name, grace, extra={"event": "draining"}
    )
    worker.stop(grace)
    _log.info("stopped", extra={"event": "stopped"})
    _exit_in_any_case()


def _exit_in_any_case() -> None:
    """Ends the process soon, even if a call that outlived the grace period keeps Python waiting for its thread."""

    def leave() -> None:
        _log.warning("a thread did not end; leaving without it", extra={"event": "abandoned"})
        logging.shutdown()
        os._exit(0)

    timer = threading.Timer(_EXIT_SECONDS, leave)
    timer.daemon = True
    timer.start()


class _EndedWhileLoading(BaseException):
    """A signal came while modules were imported. No Exception: the modules must not catch it."""


class _Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second ends the process."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._arrived = threading.Event()
        self._at_once = False
        self._install()

    def _install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            # Nothing of Python's or gRPC's own shutdown may get in the way: it could wait for the very call that
            # the second signal is meant to end.
            os._exit(128 + number)
        self._received = signal.Signals(number)
        self._arrived.set()
        if self._at_once:
            raise _EndedWhileLoading

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Within, nothing is served yet and a signal ends the daemon without waiting."""
        self._at_once = True
        try:
            yield
        except _EndedWhileLoading:
            raise typer.Exit(0) from None
        finally:
            self._at_once = False
            # What was imported may have put its own handlers there.
            self._install()

    def wait(self) -> signal.Signals:
        """Blocks until the first signal."""
        self._arrived.wait()
        assert self._received is not None
        return self._received


def main() -> None:
    """The entry point of the command ``gradwire-server``."""
    # gRPC's C code writes to stderr in a form of its own, which is neither one clear line nor JSON; what it has to
    # say arrives as a Python error too. Whoever debugs gRPC sets the variable.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app(prog_name="gradwire-server")
    except DaemonError as error:
        typer.echo(f"gradwire-server: error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
