"""A worker: listens, and serves what was exposed. The daemon runs a worker, and so can any program."""

from __future__ import annotations

import atexit
import logging
import os
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
from gradwire.autograd import AutogradMessageId, EngineHooks
from gradwire.peers.current import default_peer
from gradwire.peers.forking import refuse_if_forked
from gradwire.peers.local import LocalPeer
from gradwire.proto.v1 import link_pb2
from gradwire.system.callbacks import call_each
from gradwire.system.threads import DaemonThreads
from gradwire.torch_internals import load_symbolic_shapes
from gradwire.transport import Budget, LinkSettings, Tls
from gradwire.transport.channels import SERVICE, server_options
from gradwire_server.errors import BindFailed, CertificateError, NothingExposed, StateError
from gradwire_server.objects.internal_functions import add_internal_functions
from gradwire_server.objects.registry import Registry
from gradwire_server.objects.store import ObjectOptions, ObjectStore
from gradwire_server.serving.acceptor import SessionAcceptor
from gradwire_server.serving.binding import bind as bind_address
from gradwire_server.serving.binding import direct_address
from gradwire_server.serving.call_executor import CallExecutor
from gradwire_server.serving.certificates import ServerCertificates, check_certificates
from gradwire_server.serving.limits import HoldLimits
from gradwire_server.serving.scheduler import CallScheduler, QueueLimits
from gradwire_server.serving.servicer import Servicer
from gradwire_server.serving.unary import unary_handler
from gradwire_server.state.directory import StateDirectory

__all__ = ["Worker"]

load_symbolic_shapes()

log = logging.getLogger("gradwire.server")

_POLL_SECONDS = 0.02
"""How often a worker that stops looks whether prepared steps were committed."""
_GOODBYE_SECONDS = 1.0
"""How long a worker that stops waits at most for each of: cancelled calls, the gRPC server, reading
threads."""

_UNARY_METHODS = {
    "ForwardWithAutograd": link_pb2.METHOD_FORWARD_WITH_AUTOGRAD,
    "PropagateGradients": link_pb2.METHOD_PROPAGATE_GRADIENTS,
    "CleanupContext": link_pb2.METHOD_CLEANUP_CONTEXT,
    "Describe": link_pb2.METHOD_DESCRIBE,
    "Inspect": link_pb2.METHOD_INSPECT,
}


class Worker:
    """Serves functions, classes and modules to clients that connect.

    >>> import gradwire as gw, gradwire_server as gws
    >>> def double(x):
    ...     return 2 * x
    >>> with gws.Worker(double) as worker, gw.connect(worker.address) as handle:
    ...     handle.double(21)
    42

    `served` are modules (everything that they expose), functions, classes and callable objects. `bind` is
    one address or several: ``"host:port"``, with port 0 for a free port, or ``"unix:path"``.

    Clients on this host go around the network, and others around gRPC, over a TCP socket of its own: at
    `direct_bind` (``"host:port"``), else at any port of the first host that `bind` names. ``same_host=False``
    and ``direct=False`` leave these ways.

    A ref to an object of another worker, passed as an argument, leads this worker there only if its own code
    has connected to that address, or if a pattern in `follow` fits it, such as ``"10.0.0.*:50051"``.

    With `tls_cert` and `tls_key` (PEM files) TCP addresses take TLS connections only, and with
    `tls_client_ca` only those of clients that have a certificate which one of these CAs has signed. Files
    that change are reloaded. No direct sockets are offered then. Calls to other workers in served functions
    show the same certificate, and trust `tls_ca`, else `tls_client_ca`.

    With a `state_dir` objects that have a name, and the optimizers over them, are saved there when the worker
    stops and every `save_every` seconds if they changed. A worker that is started with the same directory
    goes on from what was saved.

    Functions that the program calls on other workers can call it back: there `gw.caller()` reaches the
    functions of the program's worker over the link that the program opened. If the program runs several
    workers, these are the functions of the worker that was started first.

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
        direct: bool = True,
        direct_bind: str | None = None,
        max_shared_bytes: int = LinkSettings.max_shared_bytes,
        follow: Sequence[str] = (),
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_client_ca: str | os.PathLike[str] | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        save_every: float | None = None,
    ) -> None:
        if not served:
            raise NothingExposed("there is nothing to serve: name a module, a function or a class")
        self._certificates = _certificates(tls_cert, tls_key, tls_client_ca)
        if self._certificates is not None and direct_bind is not None:
            raise ValueError("direct_bind is of no use with TLS: direct sockets are plain text")
        self._binds = (bind,) if isinstance(bind, str) else tuple(bind)
        self._direct_bind = direct_bind
        self._grace = grace
        self._registry = Registry(served)
        self._settings = LinkSettings(
            lease=lease,
            lost_after=lost_after,
            max_message_bytes=max_message_bytes,
            max_tensor_elements=max_tensor_elements,
            max_bytes_in_flight=min(max_bytes_in_flight_per_client, max_bytes_in_flight),
            same_host=same_host,
            direct=direct and self._certificates is None,  # it is plain text
            max_shared_bytes=max_shared_bytes,
        )
        self._peer = LocalPeer(name)
        self._peer.followed = tuple(follow)
        if self._certificates is not None or tls_ca is not None:
            self._peer.tls = Tls(tls_ca or tls_client_ca, tls_cert, tls_key)
            check_certificates(self._peer.tls.files)
        self._scheduler = CallScheduler(
            self._peer.pool,
            QueueLimits(threads, threads_per_client, max_queued_calls, max_queued_calls_per_client),
        )
        self._objects = ObjectStore(
            self._peer.identity.id,
            lambda: self._peer.engine.new_id().number,
            self._registry.method_names,
        )
        for instance_name, instance in self._registry.instances.items():
            self._objects.add(instance, None, ObjectOptions(instance_name, permanent=True))
        add_internal_functions(self._registry, self._objects)
        self._hold_limits = hold_limits
        self._peer.engine.limits = wire.Limits(max_tensor_elements=max_tensor_elements)
        executor = self._executor_for(self._peer)
        if save_every is not None and state_dir is None:
            raise ValueError("save_every is of no use without a state_dir to save to")
        self._save_every = save_every
        self._state: StateDirectory | None = None
        if state_dir is not None:
            self._state = StateDirectory(Path(state_dir), self._objects, executor.recreate)
        self._saved = threading.Event()
        """Set when `stop` has saved the state, or failed to."""
        self._servicer = Servicer(self._peer, self._registry, self._scheduler, executor)
        self._program_peer: LocalPeer | None = None
        """The program's own peer, if this worker serves callbacks: requests that come over the links that the
        program opened."""
        self._callback_servicer: Servicer | None = None
        """Serves those requests."""
        self._acceptor = SessionAcceptor(
            self._peer.identity,
            self._peer.dispatch,
            self._settings,
            self._peer.add_link,
            Budget(max_bytes_in_flight),
        )
        self._max_unary_bytes = max_unary_bytes
        self._health = health
        self._reflection = reflection
        # Every open stream occupies a thread of this pool for as long as it is open.
        self._streams_pool = DaemonThreads("gradwire-stream")
        self._started = False
        self._server: grpc.Server | None = None
        self._health_servicer: health_module.HealthServicer | None = None
        self.addresses: tuple[str, ...] = ()
        """Where the worker listens, with real ports. Empty until it has started."""

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
        """The names of the functions, classes and objects that the worker serves."""
        return self._registry.names

    def start(self) -> Self:
        """Listens. Returns when clients can reach the worker. Raises BindFailed if an address cannot be had,
        and StateError if the state directory cannot be used."""
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
                self._state.unlock()
            raise
        if self._state is not None and self._save_every is not None:
            self._state.save_every(self._save_every)
        log.debug("%s serves %s at %s", self.name, ", ".join(self.functions), ", ".join(self.addresses))
        return self

    def _listen(self) -> None:
        # gRPC asks for a ThreadPoolExecutor, and uses only what any executor has.
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
            credentials = None if self._certificates is None else self._certificates.credentials()
            self.addresses = tuple(bind_address(server, address, credentials) for address in self._binds)
            self._acceptor.direct_address = self._direct_bind or direct_address(self.addresses)
            if (
                self._direct_bind is not None
                and self._settings.direct
                and not self._acceptor.listen_directly()
            ):
                raise BindFailed(
                    f"cannot listen on {self._direct_bind} for direct connections", address=self._direct_bind
                )
        except BindFailed:
            # The addresses that were bound must be freed, and gRPC frees them only if the server was started.
            server.start()
            server.stop(None).wait(_GOODBYE_SECONDS)
            self._streams_pool.shutdown()
            self._peer.close()
            raise
        self._server = server
        self._servicer.open()
        self._attach_store(self._peer)
        self._serve_callbacks()
        server.start()
        _running[self] = None
        self._peer.engine.leases.sweep_every(self._settings.lease)
        self._objects.keep_lease(self._settings.lease, self._is_linked)
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    def _executor_for(self, peer: LocalPeer) -> CallExecutor:
        return CallExecutor(peer, self._registry, self._objects, self._peer.engine.limits, self._hold_limits)

    def _attach_store(self, peer: LocalPeer) -> None:
        """Connects the object store to a peer in whose name refs are sent: objects are dropped when their
        refs are released there or their clients are gone, and backwards there wait for optimizer steps."""
        peer.engine.attach(
            EngineHooks(
                when_released=partial(self._release_objects, peer.identity.id),
                when_owner_dropped=self._drop_owner,
                guard_backward=self._objects.parameters.read_by_backward,
                guard_step=self._objects.parameters.stepping,
            )
        )
        self._objects.peers.add(peer.identity.id)

    def _release_objects(self, peer_id: int, released: Sequence[AutogradMessageId]) -> None:
        # Refs are released by the same requests as messages: the number of the id is the
        # release number of the ref.
        self._objects.release(id.number for id in released if id.peer == peer_id)

    def _serve_callbacks(self) -> None:
        """Serves the workers that the program calls, unless another worker of the program does so already.

        Those workers know the program by its own peer, and their calls are recorded in the graph of that
        peer. So gradients flow through callbacks as through anything else that the program computes.
        """
        with _callbacks_lock:
            program_peer = default_peer()
            if program_peer.serves_functions:
                return
            self._program_peer = program_peer
            executor = self._executor_for(program_peer)
            self._callback_servicer = Servicer(program_peer, self._registry, self._scheduler, executor)
            self._callback_servicer.open()
        self._attach_store(program_peer)

    def _stop_serving_callbacks(self) -> None:
        """The program keeps its peer and the links that it opened, and serves nothing over them any more."""
        if self._program_peer is not None and self._callback_servicer is not None:
            self._callback_servicer.close()
            self._program_peer.engine.attach(EngineHooks())

    def _is_linked(self, client: int) -> bool:
        peers = [peer for peer in (self._peer, self._program_peer) if peer is not None]
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
        for servicer in (self._servicer, self._callback_servicer):
            if servicer is not None:
                servicer.draining = True
        give_up_at = time.monotonic() + (self._grace if grace is None else grace)
        finished = self._wait_for_calls(give_up_at)
        if not finished:
            log.warning("%d calls did not finish in time", self._scheduler.unfinished)
        self._acceptor.wait_until_delivered(max(give_up_at - time.monotonic(), 0.0))
        # Saved before the clients are told goodbye, because their optimizers are dropped with them.
        not_saved = self._save_and_close()
        # Says goodbye to the clients, which cancels the calls that still run.
        self._acceptor.close()
        if self._callback_servicer is not None:
            self._callback_servicer.cancel_running_calls()
        idle = self._scheduler.wait_until_idle(_GOODBYE_SECONDS)
        self._stop_serving_callbacks()
        # The first of the workers that still run serves callbacks from now on.
        call_each(other._serve_callbacks for other in list(_running))
        self._peer.close()
        ended = _stop_server(server)
        # Idle threads end at once. A thread in a function that does not return is not waited for.
        self._streams_pool.shutdown(wait=ended)
        self._peer.pool.shutdown(wait=idle)
        if not_saved is not None:
            raise not_saved
        return finished

    def _wait_for_calls(self, give_up_at: float) -> bool:
        """Waits for prepared steps, calls and backwards. Returns whether all ended in time."""

        def left() -> float:
            return max(give_up_at - time.monotonic(), 0.0)

        while self._objects.has_prepared_steps and left():
            time.sleep(min(_POLL_SECONDS, left()))
        return self._scheduler.wait_until_idle(left()) and self._peer.wait_for_backwards(left())

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
        """Whether `stop` has saved the state, or failed to. No grace period cuts the saving short."""
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
"""The workers that run in this process, in the order in which they were started."""
_callbacks_lock = threading.Lock()
"""Held while a worker becomes the server of callbacks."""


@atexit.register
def _stop_running_workers() -> None:
    call_each(partial(worker.stop, 0.0) for worker in list(_running))


os.register_at_fork(after_in_child=_running.clear)


def _certificates(
    cert: str | os.PathLike[str] | None,
    key: str | os.PathLike[str] | None,
    client_ca: str | os.PathLike[str] | None,
) -> ServerCertificates | None:
    if cert is None and key is None:
        if client_ca is not None:
            raise CertificateError(
                f"the CA of clients, {os.fspath(client_ca)}, is of no use without a certificate and a key of "
                "the worker (tls_cert and tls_key)"
            )
        return None
    return ServerCertificates(Tls(client_ca, cert, key).files)


def _stop_server(server: grpc.Server) -> bool:
    """Stops a gRPC server, which has a moment to write its last messages. Returns whether it has ended."""
    try:
        return bool(server.stop(_GOODBYE_SECONDS).wait(2 * _GOODBYE_SECONDS))
    except RuntimeError:
        # gRPC starts a thread to stop a server. At the end of the interpreter, newer versions of Python start
        # no threads, and the server ends with the process.
        return False
