"""What a caller knows of the graphs that its workers keep: what results depend on, and which have a graph in
common."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from gradwire.autograd.graph import ANCHOR, TOKEN, apply, gives_token
from gradwire.autograd.records import ReceivedTensors, SentArguments

__all__ = ["RemoteGraphSegment", "ResultGroup", "SegmentToken", "arguments_behind", "join"]

_lock = threading.Lock()


class ResultGroup:
    """Results that have parts of a worker's graph in common: their gradients had better go together."""

    def __init__(self) -> None:
        self.members: weakref.WeakSet[ReceivedTensors | SentArguments | RemoteGraphSegment] = (
            weakref.WeakSet()
        )
        """The results, and what lies behind them."""

    @property
    def results(self) -> list[ReceivedTensors]:
        with _lock:
            return [member for member in self.members if isinstance(member, ReceivedTensors)]


class RemoteGraphSegment:
    """The part of a worker's graph that a segment handle names, and this peer's arguments behind it.

    Kept until the worker says that nothing there leads into that part any more.
    """

    def __init__(self, received: ReceivedTensors) -> None:
        self.source = received.source
        self.peer = received.source.peer
        self.context = received.context
        self.group: ResultGroup | None = None
        self.builds_on: Sequence[RemoteGraphSegment] = received.builds_on
        # Weakly: the worker says of each message by itself when nothing there refers to it any more.
        self._arguments = [weakref.ref(sent) for sent in received.depends_on]

    @property
    def arguments(self) -> list[SentArguments]:
        """Arguments that this peer sent, without those of the segments that this segment builds on."""
        return [sent for reference in self._arguments if (sent := reference()) is not None]

    @cached_property
    def token(self) -> torch.Tensor:
        """One token for all that it depends on. Without it each result would need a token for every send
        node."""
        tokens = [*(sent.token for sent in self.arguments), *(below.token for below in self.builds_on)]
        with torch.enable_grad():
            token: torch.Tensor = apply(SegmentToken, *tokens, ANCHOR)
        return token


def join(received: ReceivedTensors, may_be_built_on: bool) -> None:
    """Puts results into a group with those that they build on, or that depend on the same arguments.

    Not across contexts or workers: their gradients go to different places, and at different times.
    """
    behind: list[SentArguments | RemoteGraphSegment] = [*received.depends_on, *received.builds_on]
    if any(b.peer != received.source.peer or b.context != received.context for b in behind):
        return
    segment = RemoteGraphSegment(received)
    with _lock:
        groups = {b.group for b in behind if b.group is not None}
        largest = max(groups, key=lambda group: len(group.members), default=ResultGroup())
        others = [member for group in groups - {largest} for member in group.members]
        for member in (received, segment, *received.depends_on, *others):
            member.group = largest
            largest.members.add(member)
    if may_be_built_on:
        received.engine.container.keep_remote_segment(segment)
        if received.link is not None:
            received.engine.releases.to(received.link).append_learned(received.source)


@gives_token
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
    arguments = list(received.depends_on)
    stack = list(received.builds_on)
    while stack:
        segment = stack.pop()
        if segment not in passed:
            passed.add(segment)
            arguments += segment.arguments
            stack += segment.builds_on
    return arguments
