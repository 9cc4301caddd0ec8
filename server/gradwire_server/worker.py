"""A worker: listens, and serves what was exposed. The daemon runs one; so can any program."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health as health_module
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection as reflection_module

from gradwire import wire
from gradwire.autograd import borrowed_grad
from gradwire.autograd.engine import not_kept_apart
from gradwire.peers.current import default_peer
from gradwire.peers.forking import refuse_if_forked
from gradwire.peers.local import LocalPeer
from gradwire.proto.v1 import link_pb2
from gradwire.system.callbacks import call_each
from gradwire.system.threads import DaemonThreads
from gradwire.torch_internals import load_symbolic_shapes
from gradwire.transport import LinkSettings, MemoryBudget
from gradwire.transport.channels import SERVICE, server_options
from gradwire_server.errors import BindFailed, NothingExposed, StateError
from gradwire_server.objects.registry import Registry
from gradwire_server.objects.store import ObjectStore
from gradwire_server.objects.verbs import add_training
from gradwire_server.serving.acceptor import SessionAcceptor
from gradwire_server.serving.calling import CallRunner
from gradwire_server.serving.execution import QueueLimits, Slots
from gradwire_server.serving.limits import HoldLimits
from gradwire_server.serving.servicer import Servicer
from gradwire_server.serving.unary import unary_handler
from gradwire_server.state.directory import StateDir

__all__ = ["Worker"]

load_symbolic_shapes()

log = logging.getLogger("gradwire.server")

_POLL_SECONDS = 0.02
_FAREWELL_SECONDS = 1.0

_UNARY_METHODS = {
    "ForwardWithAutograd": link_pb2.METHOD_FORWARD_WITH_AUTOGRAD,
    "PropagateGradients": link_pb2.METHOD_PROPAGATE_GRADIENTS,
    "CleanupContext": link_pb2.METHOD_CLEANUP_CONTEXT,
    "Describe": link_pb2.METHOD_DESCRIBE,
    "Inspect": link_pb2.METHOD_INSPECT,
}


class Worker:
    """Serves functions, classes and modules to whoever connects.

    >>> import gradwire as gw, gradwire_server as gws
    >>> def double(x):
    ...     return 2 * x
    >>> with gws.Worker(double) as worker, gw.connect(worker.address) as handle:
    ...     handle.double(21)
    42

    `served` are modules (everything that they expose), functions, classes and callable objects. `bind` is
    one address or several: ``"host:port"``, port 0 for a free one, or ``"unix:path"``.

    With a `state_dir` objects that have a name, and the optimizers over them, are saved there when the worker
    stops and every `save_every` seconds if they changed; a worker that is started with it goes on from them.

    What the program calls elsewhere can call it back: `gw.caller()` reaches the functions of its worker over
    the link that the program opened. Of several workers that run at a time, those of the first.

    A worker keeps no process alive. When the program ends, in whatever way, a worker that it did not stop is
    stopped without a grace period: calls in flight are cancelled, state is saved, clients are told goodbye.
    """

    def __init__(
        self,
        *served: object,
        bind: str | Sequence[str] = "127.0.0.1:0",
        name: str | None = None,
        threads: int = QueueLimits.threads,
        threads_per_client: int | None = QueueLimits.threads_per_client,
        max_queued_calls: int = QueueLimits.queued,
        max_queued_calls_per_client: int = QueueLimits.queued_per_client,
        lease: float = LinkSettings.lease,
        lost_after: float = LinkSettings.lost_after,
        max_message_bytes: int = LinkSettings.max_message_bytes,
        max_tensor_elements: int = LinkSettings.max_tensor_elements,
        max_bytes_in_flight: int = 1 << 40,
        max_bytes_in_flight_per_client: int = LinkSettings.max_bytes_in_flight,
        hold_limits: HoldLimits = HoldLimits(),  # noqa: B008 - frozen
        max_unary_bytes: int = 64 << 20,
        grace: float = 10.0,
        health: bool = True,
        reflection: bool = True,
        same_host: bool = True,
        max_shared_bytes: int = LinkSettings.max_shared_bytes,
        state_dir: str | os.PathLike[str] | None = None,
        save_every: float | None = None,
    ) -> None:
        if not served:
            raise NothingExposed("there is nothing to serve: name a module, a function or a class")
        self._binds = (bind,) if isinstance(bind, str) else tuple(bind)
        self._grace = grace
        self._registry = Registry(served)
        self._settings = LinkSettings(
            lease=lease,
            lost_after=lost_after,
            max_message_bytes=max_message_bytes,
            max_tensor_elements=max_tensor_elements,
            max_bytes_in_flight=min(max_bytes_in_flight_per_client, max_bytes_in_flight),
            same_host=same_host,
            max_shared_bytes=max_shared_bytes,
        )
        self._peer = LocalPeer(name)
        self._slots = Slots(
            self._peer.pool,
            QueueLimits(threads, threads_per_client, max_queued_calls, max_queued_calls_per_client),
        )
        self._objects = ObjectStore(
            self._peer.identity.id,
            lambda: self._peer.engine.new_id().number,
            self._registry.method_names,
        )
        for instance_name, instance in self._registry.instances.items():
            self._objects.keep(instance, owner=None, name=instance_name, permanent=True)
        add_training(self._registry, self._objects)
        self._hold_limits = hold_limits
        self._peer.engine.limits = wire.Limits(max_tensor_elements=max_tensor_elements)
        runner = self._runner_for(self._peer)
        if save_every is not None and state_dir is None:
            raise ValueError("save_every is of no use without a state_dir to save to")
        self._save_every = save_every
        self._state: StateDir | None = None
        if state_dir is not None:
            self._state = StateDir(Path(state_dir), self._objects, runner.make_again)
        self._saved = threading.Event()
        self._servicer = Servicer(self._peer, self._registry, self._slots, runner)
        self._program: LocalPeer | None = None
        """The program's own peer, if others reach this worker over the links that the program opened."""
        self._callbacks: Servicer | None = None
        self._acceptor = SessionAcceptor(
            self._peer.identity,
            self._peer.dispatch,
            self._settings,
            self._peer.add_link,
            MemoryBudget(max_bytes_in_flight),
        )
        self._max_unary_bytes = max_unary_bytes
        self._health = health
        self._reflection = reflection
        # Each open stream holds one of its threads for as long as it is open.
        self._streams_pool = DaemonThreads("gradwire-stream")
        self._started = False
        self._server: grpc.Server | None = None
        self._health_servicer: health_module.HealthServicer | None = None
        self.addresses: tuple[str, ...] = ()
        """Where it listens, with real ports. Empty until it has started."""

    @property
    def name(self) -> str:
        return self._peer.identity.name

    @property
    def address(self) -> str:
        """The first of the addresses."""
        if not self.addresses:
            raise RuntimeError("the worker has not been started")
        return self.addresses[0]

    @property
    def functions(self) -> tuple[str, ...]:
        """The names of what it serves."""
        return self._registry.names

    def start(self) -> Self:
        """Listens. Returns when it can be reached; raises BindFailed if an address cannot be had, and
        StateError if the state directory cannot be used."""
        refuse_if_forked()
        if self._started:
            raise RuntimeError("a worker can be started once")
        self._started = True
        if self._state is not None:
            self._state.open()
        try:
            self._listen()
        except BaseException:
            if self._state is not None:
                self._state.release()
            raise
        if self._state is not None and self._save_every is not None:
            self._state.save_every(self._save_every)
        log.debug("%s serves %s at %s", self.name, ", ".join(self.functions), ", ".join(self.addresses))
        return self

    def _listen(self) -> None:
        # Of a thread pool gRPC needs that it is an executor.
        server = grpc.server(self._streams_pool, options=server_options(self._settings))  # type: ignore[arg-type]
        server.add_generic_rpc_handlers((self._handlers(),))
        if self._health:
            self._health_servicer = health_module.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(self._health_servicer, server)
        if self._reflection:
            names = [SERVICE, reflection_module.SERVICE_NAME]
            if self._health:
                names.append(health_module.SERVICE_NAME)
            reflection_module.enable_server_reflection(names, server)
        try:
            self.addresses = tuple(_bind(server, address) for address in self._binds)
        except BindFailed:
            # The addresses that were to be had must not stay taken; gRPC lets go of them only in a server
            # that was started.
            server.start()
            server.stop(None).wait(_FAREWELL_SECONDS)
            self._streams_pool.shutdown()
            self._peer.close()
            raise
        self._server = server
        self._servicer.open()
        self._look_after(self._peer)
        self._serve_as_program()
        server.start()
        _running[self] = None
        self._peer.engine.leases.sweep_every(self._settings.lease)
        self._objects.keep_lease(self._settings.lease, self._is_linked)
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def _runner_for(self, peer: LocalPeer) -> CallRunner:
        return CallRunner(peer, self._registry, self._objects, self._peer.engine.limits, self._hold_limits)

    def _look_after(self, peer: LocalPeer) -> None:
        """Lets go of objects that were given out in the name of a peer when those who have them do."""
        # Objects have ids from the same count as messages, and are released by the same means.
        id, store = peer.identity.id, peer.engine.container
        store.when_released = lambda ids: self._objects.release(
            each.number for each in ids if each.peer == id
        )
        store.when_owner_dropped = self._drop_owner
        peer.engine.reading = self._objects.backward_through
        peer.engine.stepping = self._objects.stepping
        self._objects.peers.add(id)

    def _serve_as_program(self) -> None:
        """Serves the same to those whom the program calls, unless another worker does so already.

        They know the program by its own peer, in whose graph their calls are recorded: so gradients flow
        through them as through anything else that the program computes.
        """
        with _programs_lock:
            program = default_peer()
            if program.serves_functions:
                return
            self._program = program
            runner = self._runner_for(program)
            self._callbacks = Servicer(program, self._registry, self._slots, runner)
            self._callbacks.open()
        self._look_after(program)

    def _leave_program(self) -> None:
        """The program goes on, with the links that it opened, without serving anything."""
        if self._program is not None and self._callbacks is not None:
            self._callbacks.close()
            engine = self._program.engine
            engine.container.when_released = lambda ids: None
            engine.container.when_owner_dropped = lambda peer: None
            engine.reading = not_kept_apart
            engine.stepping = borrowed_grad

    def _is_linked(self, client: int) -> bool:
        peers = [peer for peer in (self._peer, self._program) if peer is not None]
        return any(peer.engine.leases.is_linked(client) for peer in peers)

    def _drop_owner(self, client: int) -> None:
        if not self._is_linked(client):
            self._objects.drop_owner(client)

    def stop(self, grace: float | None = None) -> bool:
        """Drains and ends: takes no new calls, lets those in flight finish for `grace` seconds.

        Returns whether all of them finished. Raises StateError at the end if the state was not saved.
        """
        server, self._server = self._server, None
        _running.pop(self, None)
        if server is None:
            return True
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        for servicer in (self._servicer, self._callbacks):
            if servicer is not None:
                servicer.draining = True
        give_up_at = time.monotonic() + (self._grace if grace is None else grace)
        finished = self._finish_what_was_begun(give_up_at)
        if not finished:
            log.warning("%d calls did not finish in time", self._slots.unfinished)
        self._acceptor.wait_until_delivered(max(give_up_at - time.monotonic(), 0.0))
        # Before the clients go, whose optimizers go with them.
        not_saved = self._save_and_close()
        # Says goodbye, which cancels what still runs.
        self._acceptor.close()
        if self._callbacks is not None:
            self._callbacks.abandon()
        idle = self._slots.wait_until_idle(_FAREWELL_SECONDS)
        self._leave_program()
        call_each(other._serve_as_program for other in list(_running))  # the first of them does
        self._peer.close()
        ended = _end(server)
        self._acceptor.join(_FAREWELL_SECONDS)
        # Threads that are done end at once; a function that does not stop must not keep us.
        self._streams_pool.shutdown(wait=ended)
        self._peer.pool.shutdown(wait=idle)
        if not_saved is not None:
            raise not_saved
        return finished

    def _finish_what_was_begun(self, give_up_at: float) -> bool:
        """Waits for calls, backwards and prepared steps. Whether all were done in time."""

        def left() -> float:
            return max(give_up_at - time.monotonic(), 0.0)

        while self._objects.has_prepared_steps and left():
            time.sleep(min(_POLL_SECONDS, left()))
        return self._slots.wait_until_idle(left()) and self._peer.wait_for_backwards(left())

    def _save_and_close(self) -> StateError | None:
        try:
            if self._state is not None:
                self._state.close()
            return None
        except StateError as error:
            log.error("%s", error, extra={"event": "save-failed"})
            return error
        finally:
            self._saved.set()

    def wait_until_saved(self, timeout: float | None = None) -> bool:
        """Whether `stop` has come past saving the state, which no grace period cuts short."""
        return self._saved.wait(timeout)

    def _handlers(self) -> grpc.GenericRpcHandler:
        methods = {
            name: unary_handler(method, self._peer.dispatch, self.name, self._max_unary_bytes)
            for name, method in _UNARY_METHODS.items()
        }
        methods["Link"] = grpc.stream_stream_rpc_method_handler(self._acceptor.serve)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        if self._health_servicer is not None:
            for service in ("", SERVICE):
                self._health_servicer.set(service, status)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


_running: dict[Worker, None] = {}
"""In the order in which they were started."""
_programs_lock = threading.Lock()


@atexit.register
def _stop_those_that_run() -> None:
    call_each(partial(worker.stop, 0.0) for worker in list(_running))


os.register_at_fork(after_in_child=_running.clear)


def _end(server: grpc.Server) -> bool:
    """Whether a server has ended, within a short time for what it still has to write."""
    try:
        return bool(server.stop(_FAREWELL_SECONDS).wait(2 * _FAREWELL_SECONDS))
    except RuntimeError:
        # gRPC starts a thread for it. When the interpreter ends, newer versions of Python start none, and the
        # server ends with the process.
        return False


def _bind(server: grpc.Server, address: str) -> str:
    """Listens on an address; returns it with the real port."""
    is_unix = address.startswith("unix:")
    if is_unix:
        _free_unix_path(address)
    else:
        _check_tcp_address(address)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise BindFailed(
            f"cannot listen on {address}: gRPC refused it; an address is HOST:PORT or unix:PATH",
            address=address,
        )
    return address if is_unix else f"{address.rpartition(':')[0]}:{port}"


def _free_unix_path(address: str) -> None:
    """A live server's socket is refused, which gRPC would take over silently; a dead one's is removed."""
    path = address.removeprefix("unix:").removeprefix("//")
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise BindFailed(f"cannot listen on {address}: the file exists and is no socket", address=address)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise BindFailed(f"cannot listen on {address}: another process serves there", address=address)


def _check_tcp_address(address: str) -> None:
    """gRPC only says that it failed, in a line of its own on stderr; asking the system first says why."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(endpoint)
    except OSError as error:
        raise BindFailed(f"cannot listen on {address}: {error.strerror or error}", address=address) from None
