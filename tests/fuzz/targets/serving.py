"""A worker that is asked without a network, and what it serves: nothing that raises by itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from tests.integration.test_hostile import peer_of

from gradwire.autograd import serve_propagate
from gradwire.proto.v1 import link_pb2
from gradwire.transport import Link, OwnIdentity, Payload, PeerIdentity, ServerCall
from gradwire.wire import Plans
from gradwire_server import Worker, expose

__all__ = ["CLIENT", "WORKER", "Asked", "ClientLink", "ask", "be_predictable", "new_worker"]

_SECRETS = {"worker": bytes(32), "client": bytes(range(32))}
WORKER, CLIENT = map(peer_of, _SECRETS.values())
"""The ids of the worker and of its client: the same in each run, so that an input always means the same."""


def be_predictable(*names: str) -> None:
    """Has the peers that this process makes next have these ids, and gives everything that peers make the
    same key in each run."""
    left, another = iter(names), OwnIdentity.new

    def new(said: str) -> OwnIdentity:
        name = next(left, None)
        if name is None:
            return another(said)
        return OwnIdentity(peer_of(_SECRETS[name]), name, secret=_SECRETS[name], proof_key=bytes(32))

    mock.patch.object(OwnIdentity, "new", new).start()
    mock.patch("gradwire.wire.ids.urandom", lambda size: b"\1" * size).start()
    mock.patch("gradwire_server.objects.store.new_id", itertools.count(1).__next__).start()


@expose
def echo(*args: object, **kwargs: object) -> object:
    return [*args, *kwargs.values()]


@expose
def scale(x: object, by: object = 2.0) -> object:
    """A function that can be differentiated; for anything else it returns nothing."""
    try:
        return x * by  # type: ignore[operator]
    except Exception:
        return None


@expose
class Layer(torch.nn.Module):
    def __init__(self, size: object = 3) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size if isinstance(size, int) and 0 <= size < 100 else 3))

    def forward(self, x: object = 1.0) -> object:
        try:
            return self.weight * x
        except Exception:
            return None


class ClientLink(Link):
    """A link over which the worker cannot send anything."""

    inline_bytes = 1 << 20

    def __init__(self) -> None:
        self.local, self.peer = PeerIdentity(WORKER, "worker"), PeerIdentity(CLIENT, "client")
        self.plans = Plans()

    def send_request(self, *args: Any, **kwargs: Any) -> Any:
        from gradwire.errors import LinkClosed

        raise LinkClosed("it is no real link")

    def read_for(self, future: Any) -> None: ...
    def read_in_background(self, future: Any) -> None: ...
    def close(self, *, leaving: bool = False) -> None: ...
    def abort(self, error: Exception) -> None: ...
    def count_saved(self, size: int) -> None: ...
    def when_ended(self, callback: Any) -> None: ...

    @property
    def connected(self) -> bool:
        return True

    @property
    def traffic(self) -> Any:
        raise NotImplementedError

    @property
    def ended(self) -> None:
        return None


class Asked(ServerCall):
    """A request, and its response."""

    deadline = None

    def __init__(self, method: int, body: bytes, attachments: Sequence[Any], link: Link | None) -> None:
        super().__init__()
        self.method, self.link = method, link
        self.request = Payload(body, attachments)
        self.body: bytes = b""
        self.error: link_pb2.Error | None = None
        self.is_done = False

    def may_run_inline(self) -> bool:
        return True

    def respond(self, body: bytes, attachments: Sequence[Any] = ()) -> bool:
        was_done, self.is_done = self.is_done, True
        if not was_done:
            self.body = body
        return not was_done

    def fail(self, error: link_pb2.Error) -> None:
        if not self.is_done:
            self.is_done, self.error = True, error


def new_worker() -> Worker:
    """A worker that listens nowhere."""
    be_predictable("worker")
    worker = Worker(echo, scale, Layer, name="worker", threads=2)
    worker._servicer.open()
    worker._attach_store(worker._peer)
    return worker


def ask(
    worker: Worker, method: int, body: bytes = b"", attachments: Sequence[Any] = (), link: Link | None = None
) -> Asked:
    """Has a worker serve a request, on this thread."""
    asked = Asked(method, body, attachments, link)
    if method == link_pb2.METHOD_FORWARD_WITH_AUTOGRAD:
        worker._peer.serve(asked, worker._servicer._forward)
    elif method == link_pb2.METHOD_PROPAGATE_GRADIENTS:
        worker._peer.serve(asked, partial(serve_propagate, worker._peer.engine))
    else:
        try:
            worker._peer.dispatch(asked)
        except Exception as error:
            from gradwire.transport import faults

            asked.fail(faults.describe(error, "worker"))
    return asked
