"""Error feedback: what rounding left out of a gradient is added to the next gradient of the same call site.

A call site is known by the other peer, the function and the object, which of its tensors, and their shape and
strides. The memory for what was left out is bounded; the call site that was not used for longest loses its
share first, and starts anew.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import torch

from gradwire import wire
from gradwire.proto.v1 import autograd_pb2, tensor_pb2

__all__ = ["MAX_BYTES", "ErrorFeedback", "GradientCodecs"]

MAX_BYTES = 256 << 20
"""How many bytes a peer keeps for error feedback."""


class CallSite(NamedTuple):
    """Where a gradient goes: the same in every step."""

    peer: int
    site: int
    position: int
    """The position of the message among those in a response."""
    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class ErrorFeedback:
    """What rounding left out, for each call site: it is owed to the next gradient. Used from any thread."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._owed: OrderedDict[CallSite, torch.Tensor] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return self._bytes

    def take(self, site: CallSite) -> torch.Tensor | None:
        with self._lock:
            owed = self._owed.pop(site, None)
            if owed is not None:
                self._bytes -= owed.nbytes
            return owed

    def put(self, site: CallSite, owed: torch.Tensor) -> None:
        with self._lock:
            before = self._owed.pop(site, None)
            if before is not None:
                # Two gradients of the call site were on their way at a time: both are owed.
                self._bytes -= before.nbytes
                owed = owed + before
            self._owed[site] = owed
            self._bytes += owed.nbytes
            while self._bytes > self._max_bytes:
                _, forgotten = self._owed.popitem(last=False)
                self._bytes -= forgotten.nbytes

    def forget(self, peer: int | None = None) -> None:
        """Forgets what is owed to a peer, or to all peers."""
        with self._lock:
            for site in [site for site in self._owed if peer in (None, site.peer)]:
                self._bytes -= self._owed.pop(site).nbytes


class _Residual:
    """What is owed to one call site, as codecs see it."""

    def __init__(self, feedback: ErrorFeedback, site: CallSite) -> None:
        self._feedback = feedback
        self._site = site

    def take(self) -> torch.Tensor | None:
        return self._feedback.take(self._site)

    def put(self, left_out: torch.Tensor) -> None:
        self._feedback.put(self._site, left_out)


class GradientCodecs:
    """The codecs for the gradients of one message."""

    def __init__(
        self, feedback: ErrorFeedback, peer: int, compression: autograd_pb2.Compression, *, create_graph: bool
    ) -> None:
        self._feedback = feedback
        self._peer = peer
        self._compression = compression
        # With create_graph the gradient is differentiated, so errors of earlier passes must not be added.
        self._owes = (
            compression.error_feedback and compression.backward == tensor_pb2.CODEC_INT8 and not create_graph
        )

    def find(self, gradient: torch.Tensor, slot: int, position: int = 0) -> wire.Codec | None:
        if not self._owes or gradient.layout != torch.strided:
            return wire.find_codec(self._compression.backward)
        site = CallSite(
            self._peer,
            self._compression.site,
            position,
            slot,
            tuple(gradient.shape),
            gradient.stride(),
            gradient.dtype,
        )
        return wire.find_codec(self._compression.backward, _Residual(self._feedback, site))
