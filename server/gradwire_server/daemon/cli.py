"""The command ``gradwire-server``: a worker as a daemon."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import gradwire
from gradwire import _version
from gradwire_server.daemon import config, logs
from gradwire_server.daemon.options import checked, option, size_option, use_config
from gradwire_server.daemon.shutdown import Signals, exit_after
from gradwire_server.errors import DaemonError, LoadFailed
from gradwire_server.serving.limits import HoldLimits

__all__ = ["app", "main"]

_log = logging.getLogger("gradwire.server")

_EXIT_SECONDS = 4.0
"""How long the daemon has after the grace period to say goodbye, end its threads and run exit handlers."""

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
    "  8  a certificate, key or CA file cannot be used\n"
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
        typer.echo(_version.description("gradwire-server"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


@app.command(help=_HELP, epilog=_EPILOG)
def serve(
    modules: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE[:OBJECT]",
            envvar=config.environment_variable("modules"),
            parser=checked(config.module_spec),
            help="What to serve: whole modules, or single objects of them.",
            show_default=False,
            show_envvar=False,
        ),
    ],
    expose_instance: Annotated[
        list[str],
        option(
            "expose-instance",
            "An object to share by name, under its own name or another; repeatable.",
            config.instance_spec,
            "MODULE:OBJECT[=NAME]",
        ),
    ] = [],  # noqa: B006 - typer copies it
    bind: Annotated[
        list[str],
        option(
            "bind",
            "Address to listen on: HOST:PORT or unix:PATH; repeatable. Port 0 takes a free one.",
            config.bind_address,
            "ADDRESS",
        ),
    ] = ["127.0.0.1:50051"],  # noqa: B006 - typer copies it
    name: Annotated[
        str | None,
        option(
            "name",
            "What the worker is called in logs and errors. Default: made from the host's name.",
            config.worker_name,
            "TEXT",
        ),
    ] = None,
    threads: Annotated[
        int,
        option(
            "threads",
            "Calls of other processes that run at a time; nested calls are not counted.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = 64,
    threads_per_client: Annotated[
        int | None,
        option(
            "threads-per-client",
            "Of those, calls of one client. Default: all of them.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = None,
    max_queued_calls: Annotated[
        int,
        option(
            "max-queued-calls",
            "Calls that may wait for a thread; more are refused and retried.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = 10_000,
    max_queued_calls_per_client: Annotated[
        int,
        option(
            "max-queued-calls-per-client",
            "Of those, calls of one client.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = 2_000,
    torch_threads: Annotated[
        int | None,
        option(
            "torch-threads",
            "Threads of one torch operation. Default: torch's own, the number of cores.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = None,
    lease: Annotated[
        float,
        option(
            "lease",
            "How long to keep the objects and contexts of a client after its connection was cut.",
            config.positive_seconds,
            "SECONDS",
        ),
    ] = 30.0,
    lost_after: Annotated[
        float,
        option(
            "lost-after",
            "How long another process may be out of reach before it counts as lost.",
            config.positive_seconds,
            "SECONDS",
        ),
    ] = 10.0,
    grace: Annotated[
        float,
        option(
            "grace", "How long calls in flight may take to finish on shutdown.", config.seconds, "SECONDS"
        ),
    ] = 10.0,
    max_message_bytes: Annotated[
        int,
        size_option("max-message-bytes", "The largest request to accept, as in 64MB or 1GiB.", 1 << 40),
    ] = 1 << 40,
    max_tensor_elements: Annotated[
        int,
        option(
            "max-tensor-elements",
            "How many elements a tensor may have beyond the bytes received (expanded, sparse and meta "
            f"tensors).  [default: {1 << 28:_}]",
            config.positive_integer,
            "INTEGER",
            show_default=False,
        ),
    ] = 1 << 28,
    max_bytes_in_flight: Annotated[
        int,
        size_option(
            "max-bytes-in-flight",
            "Bytes of large requests that may be in transfer, or wait, at a time.",
            1 << 40,
        ),
    ] = 1 << 40,
    max_bytes_in_flight_per_client: Annotated[
        int,
        size_option(
            "max-bytes-in-flight-per-client",
            "The same for one client; its further requests wait at the client.",
            4 << 30,
        ),
    ] = 4 << 30,
    max_contexts: Annotated[
        int,
        option("max-contexts", "Contexts of all clients together.", config.positive_integer, "INTEGER"),
    ] = HoldLimits.contexts,
    max_contexts_per_client: Annotated[
        int,
        option("max-contexts-per-client", "Contexts of one client.", config.positive_integer, "INTEGER"),
    ] = HoldLimits.contexts_per_client,
    max_objects: Annotated[
        int,
        option(
            "max-objects",
            "Objects and kept results of all clients, those with a name included.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = HoldLimits.objects,
    max_objects_per_client: Annotated[
        int,
        option(
            "max-objects-per-client",
            "Objects of one client that have no name.",
            config.positive_integer,
            "INTEGER",
        ),
    ] = HoldLimits.objects_per_client,
    max_held_bytes_per_client: Annotated[
        int,
        size_option(
            "max-held-bytes-per-client",
            "Bytes of objects, and of results kept for backward, of one client.",
            HoldLimits.bytes_per_client,
        ),
    ] = HoldLimits.bytes_per_client,
    max_held_bytes: Annotated[
        int,
        size_option("max-held-bytes", "The same for all clients together.", HoldLimits.bytes),
    ] = HoldLimits.bytes,
    health: Annotated[bool, option("health", "Serve the standard gRPC health service.")] = True,
    reflection: Annotated[
        bool, option("reflection", "Serve gRPC reflection, for tools such as grpcurl.")
    ] = True,
    same_host: Annotated[
        bool, option("same-host", "Let clients on this host bypass the network with shared memory.")
    ] = True,
    direct: Annotated[
        bool, option("direct", "Let clients on other hosts bypass gRPC with a TCP socket.")
    ] = True,
    direct_bind: Annotated[
        str | None,
        option(
            "direct-bind",
            "Where to listen for these, as HOST:PORT. [default: any port, at the host of the first --bind]",
        ),
    ] = None,
    max_shared_bytes: Annotated[
        int,
        size_option(
            "max-shared-bytes", "How much shared memory to set up for clients on this host.", 4 << 30
        ),
    ] = 4 << 30,
    follow: Annotated[
        list[str],
        option(
            "follow",
            "Addresses of workers that refs from clients may lead to, with * for any part; repeatable. "
            "Others than these, and those that the served code connects to, are refused.",
            config.address_pattern,
            "ADDRESS",
        ),
    ] = [],  # noqa: B006 - typer copies it
    tls_cert: Annotated[
        str | None,
        option(
            "tls-cert",
            "PEM file with the worker's certificate: TCP addresses take TLS connections only. Read again "
            "when it changes.",
            config.file_path,
            "FILE",
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        option("tls-key", "PEM file with the key of that certificate.", config.file_path, "FILE"),
    ] = None,
    tls_client_ca: Annotated[
        str | None,
        option(
            "tls-client-ca",
            "PEM file with CAs: clients need a certificate that one of them has signed.",
            config.file_path,
            "FILE",
        ),
    ] = None,
    tls_ca: Annotated[
        str | None,
        option(
            "tls-ca",
            "PEM file with the CAs of workers that served functions call. Default: --tls-client-ca.",
            config.file_path,
            "FILE",
        ),
    ] = None,
    tune_malloc: Annotated[
        bool, option("tune-malloc", "Keep freed memory, up to 512 MiB, for the next large tensor.")
    ] = True,
    state_dir: Annotated[
        str | None,
        option(
            "state-dir",
            "Where named objects and their optimizers are saved on shutdown, and restored from at start.",
            config.file_path,
            "DIR",
        ),
    ] = None,
    save_every: Annotated[
        float | None,
        option(
            "save-every",
            "Save the state this often, too, if it changed. Needs --state-dir.",
            config.positive_seconds,
            "SECONDS",
        ),
    ] = None,
    log_level: Annotated[
        str,
        option(
            "log-level", "The least that is logged: debug, info, warning or error.", config.log_level, "LEVEL"
        ),
    ] = "info",
    log_format: Annotated[
        str,
        option(
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
            callback=use_config,
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
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("--tls-cert and --tls-key belong together: give both")
    if tls_client_ca is not None and tls_cert is None:
        raise typer.BadParameter("--tls-client-ca needs --tls-cert and --tls-key, the worker's own")
    if tls_cert is not None and direct_bind is not None:
        raise typer.BadParameter("--direct-bind is of no use with TLS: direct sockets are plain text")
    # Imported here, because they take seconds to load, and --help must not wait for them.
    import torch

    from gradwire_server.daemon import loading
    from gradwire_server.worker import Worker

    logs.configure(log_level, log_format)
    # Python switches between threads every 5 ms by default, so a busy function would delay every response by
    # tens of milliseconds. With 0.5 ms small responses overtake the function.
    sys.setswitchinterval(0.0005)
    if torch_threads is not None:
        torch.set_num_threads(torch_threads)
    if tune_malloc:
        gradwire.tune_malloc()

    signals = Signals()
    loading.use_working_directory()
    served = [*loading.load_all(modules), *map(loading.load_instance, expose_instance)]
    # The loaded modules, torch included, stay for the life of the process. Without this the garbage collector
    # would scan all of their objects regularly, while every thread waits.
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
            direct=direct,
            direct_bind=direct_bind,
            follow=follow,
            max_shared_bytes=max_shared_bytes,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            tls_ca=tls_ca,
            state_dir=state_dir,
            save_every=save_every,
        )
    except (TypeError, ValueError) as error:
        # Two different values have one name, or a value cannot be called.
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
    exit_after(grace + _EXIT_SECONDS, worker)
    worker.stop(grace)
    _log.info("stopped", extra={"event": "stopped"})


def main() -> None:
    """The entry point of the command ``gradwire-server``."""
    try:
        app(prog_name="gradwire-server")
    except DaemonError as error:
        typer.echo(f"gradwire-server: error: {' '.join(str(error).split())}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
