"""Requests to a worker, one after another: calls, backwards, releases."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy
import torch
from tests.fuzz.inputs import Input
from tests.fuzz.mutating_bytes import mutate_bytes
from tests.fuzz.mutating_messages import mutate_body
from tests.fuzz.target import Target
from tests.fuzz.targets import serving

import gradwire as gw
from gradwire.peers.current import reset_default_peer
from gradwire.proto.v1 import autograd_pb2, describe_pb2, link_pb2
from gradwire.transport import ServerCall
from gradwire_server import Worker

__all__ = ["ATTACHMENT", "Requests", "is_of_gradwire"]

ATTACHMENT, _UNARY = 0x40, 0x80
"""The first byte of a part is the method of a request, unary or not, or says that it is an attachment of the
next one."""
_MESSAGES = {
    link_pb2.METHOD_FORWARD_WITH_AUTOGRAD: autograd_pb2.ForwardWithAutogradRequest,
    link_pb2.METHOD_PROPAGATE_GRADIENTS: autograd_pb2.PropagateGradientsRequest,
    link_pb2.METHOD_CLEANUP_CONTEXT: autograd_pb2.CleanupContextRequest,
    link_pb2.METHOD_DESCRIBE: describe_pb2.DescribeRequest,
    link_pb2.METHOD_INSPECT: describe_pb2.InspectRequest,
}
_PER_WORKER = 200
"""Inputs before the worker is made anew."""


_READING = (
    *(f"/gradwire/{room}/" for room in ("wire", "autograd", "transport", "peers", "runtime")),
    "/gradwire_server/serving/",
)
"""Where messages are read."""


class Fault(AssertionError):
    """The worker responded as it never should."""


class Requests(Target):
    name = "requests"
    most_parts = 12
    words = (
        *("echo", "scale", "Layer", "forward", "size", "x", "by", "cpu", "cpu:1", "meta", "cuda:0", "hpu"),
        *(
            "gradwire.module.state",
            "gradwire.module.state_sizes",
            "gradwire.object.delete",
            "float32",
            "bfloat16",
        ),
        *("state_dict", "__class__", "__init__", "prepare", "commit", "privateuseone"),
    )

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._served = 0

    def corpus(self) -> dict[str, Input]:
        return {name: _recorded(name) for name in _PROGRAMS}

    def mutate_part(self, random: Random, index: int, part: bytes, donor: bytes) -> bytes:
        if not part or random.random() < 0.05:
            return mutate_bytes(random, part, donor)
        kind, body = part[:1], part[1:]
        message = _MESSAGES.get(part[0] & 0x3F)
        if message is None or kind[0] & ATTACHMENT or body[:1] == b"\0":
            return kind + mutate_bytes(random, body, donor[1:])
        other = donor[1:] if donor[:1] == kind else b""
        return kind + mutate_body(random, message, body, other, self.words)

    def run(self, parts: Input) -> object:
        if self._worker is None or self._served >= _PER_WORKER:
            self._worker, self._served = serving.new_worker(), 0
        self._served += 1
        worker, link = self._worker, serving.ClientLink()
        attachments: list[numpy.ndarray] = []
        try:
            for part in parts:
                kind, body = (part[0], part[1:]) if part else (0, b"")
                if kind & ATTACHMENT:
                    attachments.append(numpy.frombuffer(bytearray(body), numpy.uint8))
                    continue
                asked = serving.ask(worker, kind & 0x3F, body, attachments, None if kind & _UNARY else link)
                attachments = []
                _check(asked, body)
        finally:
            worker._peer.engine.forget_client(serving.CLIENT, is_gone=True)
        return None


def _check(asked: serving.Asked, body: bytes) -> None:
    """Raises if a request got no response, or one that says that something in gradwire went wrong."""
    if not asked.is_done:
        raise Fault(f"no response to method {asked.method}")
    error = asked.error
    if error is None:
        return
    if error.code == link_pb2.Error.CODE_INTERNAL:
        raise Fault(f"an internal error: {error.message}\n{error.traceback}")
    if error.code == link_pb2.Error.CODE_RAISED and is_of_gradwire(error.traceback):
        raise Fault(f"{list(error.types)[:1]}: {error.message}\n{error.traceback}")


def is_of_gradwire(traceback: str) -> bool:
    """Whether what reads messages raised, and not torch or a function. Those that gradwire itself serves,
    such as the methods of optimizers, raise for arguments of wrong types as any function does."""
    frames = [line for line in traceback.splitlines() if line.lstrip().startswith("File ")]
    return not frames or any(folder in frames[-1] for folder in _READING)


# -- the corpus: what real clients send


def _plain(handle: gw.RemoteWorker) -> None:
    for _ in range(4):  # the last ones go in short
        x = torch.arange(3.0, requires_grad=True)
        handle.scale(x, 3.0).sum().backward()


def _values(handle: gw.RemoteWorker) -> None:
    handle.echo(1, "two", [3.0, {"four": None}], key=torch.ones(2, dtype=torch.int64))
    with torch.no_grad():
        handle.echo(torch.eye(3).to_sparse_csr(), torch.ones(4).expand(2, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        handle.echo(...)


def _contexts(handle: gw.RemoteWorker) -> None:
    with gw.context() as context:
        x = torch.ones(3, requires_grad=True)
        y = handle.scale(x)
        context.backward(handle.scale(y, 2.0).sum(), retain_graph=True)


def _modules(handle: gw.RemoteWorker) -> None:
    layer = handle.create("Layer", 3)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
    layer(torch.ones(3)).sum().backward()
    optimizer.step()
    layer.state_dict()


def _double(handle: gw.RemoteWorker) -> None:
    x = torch.arange(3.0, requires_grad=True)
    y = handle.scale(x, x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    gradient.sum().backward()


def _asking(handle: gw.RemoteWorker) -> None:
    handle.functions()
    handle.inspect()


_PROGRAMS = {
    "plain": _plain,
    "values": _values,
    "contexts": _contexts,
    "modules": _modules,
    "double": _double,
    "asking": _asking,
}


def _recorded(name: str) -> Input:
    """The requests that a program sends to a worker."""
    parts: list[bytes] = []

    def record(asked: ServerCall) -> None:
        parts.extend(bytes([ATTACHMENT]) + bytes(memory) for memory in asked.request.attachments)
        parts.append(bytes([asked.method]) + asked.request.body)
        dispatch(asked)

    serving.be_predictable("worker", "client")
    worker = Worker(serving.echo, serving.scale, serving.Layer, name="worker", threads=1)
    dispatch = worker._acceptor._handler
    worker._acceptor._handler = record
    with worker:
        with gw.connect(worker.address) as handle:
            _PROGRAMS[name](handle)
        reset_default_peer()
    return tuple(_without_pings(parts))[:12]


def _without_pings(parts: Sequence[bytes]) -> list[bytes]:
    return [part for part in parts if part[:1] != bytes([link_pb2.METHOD_PING])]
