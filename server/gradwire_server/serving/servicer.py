"""The servicer: handles the requests of both the Link method and the unary methods."""

from __future__ import annotations

import logging
import os
import time
from functools import partial

import torch

from gradwire import __version__, wire
from gradwire.autograd import applied_modes, nbytes
from gradwire.errors import Cancelled, MalformedMessage, Unavailable
from gradwire.peers.local import LocalPeer
from gradwire.proto.v1 import describe_pb2, link_pb2
from gradwire.runtime.scope import Scope, entered
from gradwire.transport import Handler, ServerCall, faults
from gradwire_server.objects.registry import Registry
from gradwire_server.serving.call_executor import CallExecutor
from gradwire_server.serving.call_requests import CallRequest
from gradwire_server.serving.scheduler import CallScheduler

__all__ = ["Servicer"]

log = logging.getLogger("gradwire.server")


class Servicer:
    """Serves calls, Describe and Inspect in the name of one peer."""

    def __init__(
        self, peer: LocalPeer, registry: Registry, scheduler: CallScheduler, executor: CallExecutor
    ) -> None:
        self._peer = peer
        self._registry = registry
        self._scheduler = scheduler
        self._executor = executor
        self.draining = False
        """Whether the worker is shutting down, and accepts no new calls."""
        self._methods: dict[int, Handler] = {
            link_pb2.METHOD_FORWARD_WITH_AUTOGRAD: self._schedule_forward,
            link_pb2.METHOD_DESCRIBE: self._describe,
            link_pb2.METHOD_INSPECT: self._inspect,
        }
        self._started = time.monotonic()
        self._running_calls: set[ServerCall] = set()

    @property
    def name(self) -> str:
        return self._peer.identity.name

    def open(self) -> None:
        """Serves from now on the requests that the peer gets."""
        self._peer.methods.update(self._methods)

    def close(self) -> None:
        """Serves no longer. The peer and its links stay."""
        for method in self._methods:
            self._peer.methods.pop(method, None)

    def cancel_running_calls(self) -> None:
        """Cancels the calls that still run, over links that stay open."""
        # Not Unavailable, which says that the call has not run.
        error = Cancelled(f"{self.name} is shutting down, and the call took too long", worker=self.name)
        for server_call in list(self._running_calls):
            server_call.fail(faults.describe(error, self.name))
            server_call.cancel()

    def _schedule_forward(self, server_call: ServerCall) -> None:
        """Gives a call to the scheduler, unless the worker is shutting down."""
        if self.draining and not self._ends_prepared_step(server_call):
            error = Unavailable(f"{self.name} is shutting down", worker=self.name)
            server_call.fail(faults.describe(error, self.name))
            return
        client = 0 if server_call.link is None else server_call.link.peer.id
        task = partial(self._run_forward, server_call, client)
        self._scheduler.submit(task, client, may_run_inline=server_call.may_run_inline)

    def _ends_prepared_step(self, server_call: ServerCall) -> bool:
        """Whether a call ends a step that was prepared. Refusing it would leave other workers with half a
        step."""
        try:
            request = CallRequest(server_call.request.body, server_call.link).message
        except MalformedMessage:
            return False
        return request.function in ("commit", "abort", "outcome") and self._executor.runs_on_optimizer(
            request
        )

    def _run_forward(self, server_call: ServerCall, client: int) -> None:
        self._running_calls.add(server_call)
        try:
            around_wait = partial(self._scheduler.slot_given_up, client)
            self._peer.serve(server_call, self._forward, around_wait)
        finally:
            self._running_calls.discard(server_call)

    def _forward(self, server_call: ServerCall, scope: Scope) -> None:
        link = server_call.link
        call = CallRequest(server_call.request.body, link)
        engine = self._peer.engine
        if call.released:
            engine.container.release(call.released)
        context = None if call.metadata is None else call.metadata.context
        modes = call.message.modes
        release_numbers: list[int] = []
        is_sent = False
        try:
            with entered(scope.for_request(context, modes.detect_anomaly)), applied_modes(modes):
                # With gradients off, a requester does not say when a context ends (`messages.send_call`).
                requester = link.peer.id if link is not None and torch.is_grad_enabled() else None
                with engine.container.in_use(context, requester=requester):
                    response = self._executor.execute(call, server_call, release_numbers)
            is_sent = engine.releases.respond(server_call, response)
        finally:
            if release_numbers and not is_sent:
                self._executor.release(release_numbers)
        if release_numbers:
            server_call.when_cancelled(lambda: self._executor.release(release_numbers))

    def _describe(self, server_call: ServerCall) -> None:
        wire.parse(describe_pb2.DescribeRequest, server_call.request.body)
        response = describe_pb2.DescribeResponse(
            name=self.name,
            peer=self._peer.identity.id,
            version=__version__,
            torch_version=torch.__version__,
            functions=self._registry.describe(),
            types=self._registry.describe_types(),
            devices=["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))],
        )
        server_call.respond(response.SerializeToString())

    def _inspect(self, server_call: ServerCall) -> None:
        wire.parse(describe_pb2.InspectRequest, server_call.request.body)
        clients = {link.peer.id: link for link in self._peer.links}
        now = time.monotonic()
        response = describe_pb2.InspectResponse(
            name=self.name,
            uptime_seconds=now - self._started,
            calls=self._scheduler.unfinished,
            resident_bytes=_resident_bytes(),
        )
        for context in self._peer.engine.container.contexts():
            owner = clients.get(context.id.peer)
            gradients = context.gradients().values()
            results = self._peer.engine.container.results_of(context)
            response.contexts.add(
                id=str(context.id),
                owner=owner.peer.name if owner is not None else "",
                age_seconds=now - context.since,
                results=len(results),
                arguments=len(context.arguments),
                gradients=len(gradients),
                bytes=sum(result.bytes for result in results) + sum(map(nbytes, gradients)),
            )
        for peer, link in clients.items():
            traffic = link.traffic
            response.clients.add(
                name=link.peer.name,
                peer=f"{peer:016x}",
                connected=link.connected,
                sent_bytes=traffic.sent,
                received_bytes=traffic.received,
                saved_bytes=traffic.saved,
            )
        server_call.respond(response.SerializeToString())


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # not Linux
