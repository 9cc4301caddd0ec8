"""What a caller knows of the graphs that its workers keep: what results depend on, and which have a graph in
common."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gradwire.autograd.graph import ANCHOR, TOKEN, apply
from gradwire.autograd.records import ReceivedTensors, SentArguments
from gradwire.wire.ids import AutogradMessageId

__all__ = ["RemoteGraphSegment", "arguments_behind"]

_lock = threading.Lock()
"""Guards that groups become one."""


class RemoteGraphSegment:
    """The part of a worker's graph that a segment handle names, and this peer's arguments behind it.

    Kept until the worker says that nothing there leads into that part any more.
    """

    def __init__(self, received: ReceivedTensors, builds_on: Sequence[RemoteGraphSegment]) -> None:
        self.source = received.source
        self.context = received.context
        self.arguments = received.depends_on
        """Arguments that this peer sent, without those of the segments that this segment builds on."""
        self.builds_on = builds_on
        tokens = [*(sent.token for sent in self.arguments), *(below.token for below in builds_on)]
        with torch.enable_grad():
            self.token: torch.Tensor = apply(SegmentToken, *tokens, ANCHOR)
        """One token for all that it depends on. Without it each result would need a token for every send
        node."""
        self._received = weakref.ref(received)
        self.group: weakref.WeakValueDictionary[AutogradMessageId, RemoteGraphSegment]
        """The segments that have something in common with this one: their results' gradients had better go
        together."""
        with _lock:
            self.group = max(
                (below.group for below in builds_on), key=len, default=weakref.WeakValueDictionary()
            )
            others = [below.group for below in builds_on if below.group is not self.group]
            for segment in (self, *(one for other in others for one in other.values())):
                segment.group = self.group
                self.group[segment.source] = segment

    @property
    def group_results(self) -> list[ReceivedTensors]:
        """The results of its group that still exist."""
        segments = [reference() for reference in self.group.valuerefs()]
        results = [segment._received() for segment in segments if segment is not None]
        return [received for received in results if received is not None]


class SegmentToken(torch.autograd.Function):
    """forward: tokens -> one token that stands for them all. backward: a gradient for each."""

    @staticmethod
    def forward(ctx: Any, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.tokens = len(tokens) - 1
        ctx.set_materialize_grads(False)
        return TOKEN.data

    @staticmethod
    def backward(ctx: Any, *token_gradient: Any) -> Any:
        return *[token_gradient[0]] * ctx.tokens, None


def arguments_behind(received: ReceivedTensors, passed: set[RemoteGraphSegment]) -> list[SentArguments]:
    """The arguments that may get contributions when results get gradients, without those behind segments that
    were `passed` before. Adds the segments that it passes."""
    if received.segment is None:
        return list(received.depends_on)
    arguments: list[SentArguments] = []
    stack = [received.segment]
    while stack:
        segment = stack.pop()
        if segment not in passed:
            passed.add(segment)
            arguments += segment.arguments
            stack += segment.builds_on
    return arguments
