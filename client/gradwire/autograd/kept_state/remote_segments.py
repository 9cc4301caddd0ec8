"""What a caller knows of the graphs that its workers keep: what results depend on, and which have a graph in
common."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gradwire.autograd.graph import ANCHOR, TOKEN, apply, gives_token
from gradwire.autograd.records import ReceivedTensors, SentArguments

__all__ = [
    "RemoteGraphSegment",
    "ResultGroup",
    "SegmentToken",
    "arguments_behind",
    "join",
    "token_of",
]

_lock = threading.Lock()


class ResultGroup:
    """Results that have parts of a worker's graph in common: their gradients had better go together."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[ReceivedTensors] = weakref.WeakSet()
        self._merged_into: ResultGroup | None = None

    @property
    def root(self) -> ResultGroup:
        """The group that this group has become part of."""
        group = self
        while group._merged_into is not None:
            group = group._merged_into
        return group

    @property
    def members(self) -> list[ReceivedTensors]:
        with _lock:
            return list(self.root._members)

    @staticmethod
    def merge(received: ReceivedTensors, groups: Sequence[ResultGroup]) -> ResultGroup:
        """Joins groups to one, and adds results to it."""
        with _lock:
            roots = {group.root for group in groups} or {ResultGroup()}
            largest = max(roots, key=lambda group: len(group._members))
            for small in roots - {largest}:
                largest._members |= small._members
                small._members.clear()
                small._merged_into = largest
            largest._members.add(received)
            return largest


class RemoteGraphSegment:
    """The part of a worker's graph that a segment handle names, and this peer's arguments behind it.

    Kept until the worker says that nothing there leads into that part any more.
    """

    def __init__(self, received: ReceivedTensors, group: ResultGroup) -> None:
        self.source = received.source
        self.peer = received.source.peer
        self.context = received.context
        self.group = group
        self.builds_on: Sequence[RemoteGraphSegment] = received.builds_on
        self.token: torch.Tensor | None = None
        # Weakly: the worker says of each message by itself when nothing there refers to it any more.
        self._arguments = [weakref.ref(sent) for sent in received.depends_on]

    @property
    def arguments(self) -> list[SentArguments]:
        """Arguments that this peer sent, without those of the segments that this segment builds on."""
        return [sent for reference in self._arguments if (sent := reference()) is not None]


def join(received: ReceivedTensors, may_be_built_on: bool) -> None:
    """Puts results into a group with those that they build on, or that depend on the same arguments.

    Not across contexts or workers: their gradients go to different places, and at different times.
    """
    behind: list[SentArguments | RemoteGraphSegment] = [*received.depends_on, *received.builds_on]
    if any(b.peer != received.source.peer or b.context != received.context for b in behind):
        return
    group = received.group = ResultGroup.merge(received, [b.group for b in behind if b.group is not None])
    for sent in received.depends_on:
        sent.group = group
    if may_be_built_on:
        received.engine.container.keep_remote_segment(RemoteGraphSegment(received, group))
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


def token_of(segment: RemoteGraphSegment) -> torch.Tensor:
    """One token for all that a segment depends on. Without it each result would need a token for every send
    node."""
    if segment.token is None:
        tokens = [sent.token for sent in segment.arguments]
        tokens += [token_of(below) for below in segment.builds_on]
        with torch.enable_grad():
            segment.token = apply(SegmentToken, *tokens, ANCHOR)
    token: torch.Tensor = segment.token
    return token


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
