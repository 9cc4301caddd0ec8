"""What a caller knows of the graphs that its workers keep: what results depend on, and which have a graph in
common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from gradwire.autograd.graph import ANCHOR, TOKEN, apply
from gradwire.autograd.records import ReceivedTensors, SentArguments
from gradwire.wire.ids import AutogradMessageId

__all__ = ["RemoteGraphSegment", "ResultGroup", "arguments_behind"]


class ResultGroup:
    """Results that have parts of a worker's graph in common: their gradients had better go together.

    A result that leads into parts of several groups joins the oldest. So each part is run for one more group
    at most wherever two of them meet.
    """

    def __init__(self, first: AutogradMessageId) -> None:
        self.age = first.number
        self.results: WeakValueDictionary[AutogradMessageId, ReceivedTensors] = WeakValueDictionary()


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
        groups = [below.group for below in builds_on] or [ResultGroup(received.source)]
        self.group: ResultGroup = min(groups, key=lambda group: group.age)
        self.group.results[received.source] = received


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
