"""The command ``gradwire-server``: a worker as a daemon."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

import gradwire
from gradwire import __version__
from gradwire_server.daemon import config, logs
from gradwire_server.errors import DaemonError, LoadFailed
from gradwire_server.serving.limits import HoldLimits

if TYPE_CHECKING:
    from gradwire_server.worker import Worker

__all__ = ["app", "main"]

_log = logging.getLogger("gradwire.server")

_T = TypeVar("_T")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_EXIT_SECONDS = 4.0
"""What is left after the grace period to say goodbye, end threads and run exit handlers."""
_FLUSH_SECONDS = 1.0
"""How long handlers of the log, which user code may have added, have to write what they keep back."""

_HELP = (
    "Serve what Python modules expose.\n\n"
    "Modules are loaded from the working directory. Of MODULE everything marked with @gradwire_server.expose "
    "is served; MODULE:OBJECT serves just that object, marked or not."
)

_EPILOG = (
    "Every option can also be given as an environment variable, GRADWIRE_LOST_AFTER for --lost-after, and in "
    "the config file, as lost-after in the table [serve]. An option wins over a variable, a variable over "
    "the file. The modules are GRADWIRE_MODULES and modules. Variables separate values with spaces.\n\n"
    "SIGTERM and SIGINT let calls in flight finish for --grace seconds; a second signal exits at once.\n\n"
    "\b\nExit codes:\n"
    "  0  stopped by a signal\n"
    "  1  an error of gradwire itself\n"
    "  2  wrong usage of the command line or of a variable\n"
    "  3  an address cannot be listened on, for example a port in use\n"
    "  4  a module cannot be imported, or lacks the object\n"
    "  5  a module exposes nothing\n"
    "  6  the config file cannot be used\n"
    "  7  the state directory cannot be used, or the last save failed\n"
    "130  stopped by a second SIGINT\n"
    "143  stopped by a second SIGTERM"
)

app = typer.Typer(
    name="gradwire-server",
    help="Serves Python functions, classes and torch modules to other processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables cut the names of options short in a terminal of 80 columns
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
    setting: str,
    help: str,
    check: Callable[[object], object] | None = None,
    metavar: str = "",
    *,
    show_default: bool = True,
) -> Any:
    """An option with the setting's name as flag and as environment variable."""
    flag = f"--{setting}/--no-{setting}" if check is None else f"--{setting}"
    return typer.Option(
        flag,
        envvar=config.environment_variable(setting),
        help=help,
        show_envvar=False,  # the epilog has the rule; a line for each would double the page
        metavar=metavar,
        parser=None if check is None else _checked(check),
        show_default=show_default,
    )


def _size_option(setting: str, help: str, default: int) -> Any:
    """An option for a number of bytes."""
    shown = f"{help}  [default: {config.shown_size(default)}]"
    return _option(setting, shown, config.byte_size, "SIZE", show_default=False)


@app.command(help=_HELP, epilog=_EPILOG)
def serve(
    modules: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE[:OBJECT]",
            envvar=config.environment_variable("modules"),
            parser=_checked(config.module_spec),
            help="What to serve: whole modules, or single objects of them.",
            show_default=False,
            show_envvar=False,
        ),
    ],
    expose_instance: Annotated[
        list[str],
        _option(
            "expose-instance",
            "An object to share by name, under its own or another one; repeatable.",
            config.instance_spec,
            "MODULE:OBJECT[=NAME]",
        ),
    ] = [],  # noqa: B006 - typer copies it
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
            "What the worker is called in logs and errors. Default: made from the host's name.",
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
    threads_per_client: Annotated[
        int | None,
        _option(
            "threads-per-client",
            "Of those, calls of one client. Default: all of them.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = None,
    max_queued_calls: Annotated[
        int,
        _option(
            "max-queued-calls",
            "Calls that may wait for a thread; further ones are told to come again.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = 10_000,
    max_queued_calls_per_client: Annotated[
        int,
        _option(
            "max-queued-calls-per-client",
            "Of those, calls of one client.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = 2_000,
    torch_threads: Annotated[
        int | None,
        _option(
            "torch-threads",
            "Threads of one torch operation. Default: torch's own, the number of cores.",
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
        int,
        _size_option("max-message-bytes", "The largest request to accept, as in 64MB or 1GiB.", 1 << 40),
    ] = 1 << 40,
    max_tensor_elements: Annotated[
        int,
        _option(
            "max-tensor-elements",
            "Elements that a tensor may span without that their bytes came, as expanded, sparse and meta "
            f"tensors do.  [default: {1 << 28:_}]",
            config.positive_integer,
            "INTEGER",
            show_default=False,
        ),
    ] = 1 << 28,
    max_bytes_in_flight: Annotated[
        int,
        _size_option(
            "max-bytes-in-flight",
            "How much of large requests may be on its way, or wait, at a time.",
            1 << 40,
        ),
    ] = 1 << 40,
    max_bytes_in_flight_per_client: Annotated[
        int,
        _size_option(
            "max-bytes-in-flight-per-client",
            "The same for one client, which keeps further ones back.",
            4 << 30,
        ),
    ] = 4 << 30,
    max_contexts: Annotated[
        int,
        _option("max-contexts", "Contexts of all clients together.", config.positive_integer, "INTEGER"),
    ] = HoldLimits.contexts,
    max_contexts_per_client: Annotated[
        int,
        _option("max-contexts-per-client", "Contexts of one client.", config.positive_integer, "INTEGER"),
    ] = HoldLimits.contexts_per_client,
    max_objects: Annotated[
        int,
        _option(
            "max-objects",
            "ObjectStore and kept results of all clients, those with a name included.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = HoldLimits.objects,
    max_objects_per_client: Annotated[
        int,
        _option(
            "max-objects-per-client",
            "ObjectStore of one client that have no name.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = HoldLimits.objects_per_client,
    max_held_bytes_per_client: Annotated[
        int,
        _size_option(
            "max-held-bytes-per-client",
            "Bytes of objects, and of results kept for backward, of one client.",
            HoldLimits.bytes_per_client,
        ),
    ] = HoldLimits.bytes_per_client,
    max_held_bytes: Annotated[
        int,
        _size_option("max-held-bytes", "The same for all clients together.", HoldLimits.bytes),
    ] = HoldLimits.bytes,
    health: Annotated[bool, _option("health", "Serve the standard gRPC health service.")] = True,
    reflection: Annotated[
        bool, _option("reflection", "Serve gRPC reflection, for tools such as grpcurl.")
    ] = True,
    same_host: Annotated[
        bool, _option("same-host", "Let clients on this host go around the network, in shared memory.")
    ] = True,
    max_shared_bytes: Annotated[
        int,
        _size_option(
            "max-shared-bytes", "How much shared memory to set up for clients on this host.", 4 << 30
        ),
    ] = 4 << 30,
    tune_malloc: Annotated[
        bool, _option("tune-malloc", "Keep freed memory, up to 512 MiB, for the next large tensor.")
    ] = True,
    state_dir: Annotated[
        str | None,
        _option(
            "state-dir",
            "Where named objects and their optimizers are saved on shutdown, and restored from at start.",
            config.directory,
            "DIR",
        ),
    ] = None,
    save_every: Annotated[
        float | None,
        _option(
            "save-every",
            "Save the state this often, too, if it changed. Needs --state-dir.",
            config.positive_seconds,
            "SECONDS",
        ),
    ] = None,
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
            show_envvar=False,
        ),
    ] = None,
) -> None:
    if save_every is not None and state_dir is None:
        raise typer.BadParameter("--save-every needs --state-dir, a directory to save to")
    # Only now: they take seconds to load, and --help must not wait for them.
    import torch

    from gradwire_server.daemon import loading
    from gradwire_server.worker import Worker

    logs.configure(log_level, log_format)
    # Python hands over between threads every 5 ms by default: a busy function would delay every response by
    # tens of milliseconds. At 0.5 ms small responses overtake it.
    sys.setswitchinterval(0.0005)
    if torch_threads is not None:
        torch.set_num_threads(torch_threads)
    if tune_malloc:
        gradwire.tune_malloc()

    signals = _Signals()
    loading.use_working_directory()
    served = [*loading.load_all(modules), *map(loading.load_instance, expose_instance)]
    # What was loaded stays. The collector would look at all of it now and then, torch included, while
    # everything else waits.
    gc.freeze()
    signals.loaded()
    try:
        worker = Worker(
            *served,
            bind=bind,
            name=name,
            threads=threads,
            threads_per_client=threads_per_client,
            max_queued_calls=max_queued_calls,
            max_queued_calls_per_client=max_queued_calls_per_client,
            max_message_bytes=max_message_bytes,
            max_tensor_elements=max_tensor_elements,
            max_bytes_in_flight=max_bytes_in_flight,
            max_bytes_in_flight_per_client=max_bytes_in_flight_per_client,
            hold_limits=HoldLimits(
                contexts=max_contexts,
                contexts_per_client=max_contexts_per_client,
                objects=max_objects,
                objects_per_client=max_objects_per_client,
                bytes_per_client=max_held_bytes_per_client,
                bytes=max_held_bytes,
            ),
            lease=lease,
            lost_after=lost_after,
            grace=grace,
            health=health,
            reflection=reflection,
            same_host=same_host,
            max_shared_bytes=max_shared_bytes,
            state_dir=state_dir,
            save_every=save_every,
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
    _exit_in_any_case(grace + _EXIT_SECONDS, worker)
    worker.stop(grace)
    _log.info("stopped", extra={"event": "stopped"})


def _exit_in_any_case(seconds: float, worker: Worker) -> None:
    """Ends the process after that time, even if a call outlived its grace and Python waits for its thread."""

    def leave() -> None:
        # However long that takes: whoever cannot wait sends a second signal.
        worker.wait_until_saved()
        _log.warning("a thread did not end; leaving without it", extra={"event": "abandoned"})
        _leave(0)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


class _Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second ends the process.

    A thread of its own reads the numbers of the signals that arrive. Python runs handlers in the main thread
    only, and there a signal that comes just before it blocks would wait for the next one.
    """

    def __init__(self) -> None:
        self._first: signal.Signals | None = None
        self._arrived = threading.Event()
        self._loading = True
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._install()
        # A child, of a data loader say, that is sent a signal must not write to the pipe of its parent.
        os.register_at_fork(after_in_child=_default_signals)
        threading.Thread(target=self._read, name="gradwire-signals", daemon=True).start()

    def _install(self) -> None:
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, _leave_to_the_thread)

    def _read(self) -> None:
        while True:
            for number in os.read(self._reading, 64):
                # The pipe hears of every signal that has a handler, those of the user's modules included.
                if number in _SIGNALS:
                    self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        if self._loading:
            # Nothing is served yet, and an import may take long: there is nothing to wait for.
            _leave(0)
        if self._first is not None:
            _leave(128 + number)
        self._first = number
        self._arrived.set()

    def loaded(self) -> None:
        """From now on the first signal drains. Handlers that modules installed are replaced."""
        self._install()
        self._loading = False

    def wait(self) -> signal.Signals:
        """Blocks until the first signal."""
        self._arrived.wait()
        assert self._first is not None
        return self._first


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """A handler must be there, or the signal would end the process."""


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _leave(code: int) -> NoReturn:
    # Python's and gRPC's own shutdown could wait for the very call that is to be ended; so could a handler of
    # the user's own, which may have a lock that the call holds.
    ending = threading.Thread(target=logging.shutdown, daemon=True)
    ending.start()
    ending.join(_FLUSH_SECONDS)
    logs.finish()
    os._exit(code)


def main() -> None:
    """The entry point of the command ``gradwire-server``."""
    try:
        app(prog_name="gradwire-server")
    except DaemonError as error:
        typer.echo(f"gradwire-server: error: {' '.join(str(error).split())}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
