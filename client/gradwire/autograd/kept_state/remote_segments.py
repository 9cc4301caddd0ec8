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

__all__ = ["RemoteGraphSegment", "ResultGroup", "arguments_behind", "leave_out"]


class ResultGroup:
    """Results that have parts of a worker's graph in common: their gradients had better go together.

    A result that leads into parts of several groups joins the oldest. So each part is run for one more group
    at most wherever two of them meet.
    """

    def __init__(self, first: AutogradMessageId) -> None:
        self.age = first.number
        self.results = weakref.WeakValueDictionary[AutogradMessageId, ReceivedTensors]()


class RemoteGraphSegment:
    """The part of a worker's graph that a segment handle names, and this peer's arguments behind it.

    Kept until the worker says that nothing there leads into that part any more.
    """

    def __init__(
        self, id: AutogradMessageId, received: ReceivedTensors, builds_on: Sequence[RemoteGraphSegment]
    ) -> None:
        self.id = id
        self.context = received.context
        self.builds_on = builds_on
        # Weakly, since the worker says of each message by itself when nothing there refers to it any more.
        self._arguments = weakref.WeakValueDictionary[AutogradMessageId, SentArguments](
            {sent.id: sent for sent in received.depends_on}
        )
        self._above = weakref.WeakSet[RemoteGraphSegment]()
        """Segments that build on this one."""
        self._token: torch.Tensor | None = None
        # By arguments, too: where results are read in another order, what they build on is not known yet.
        behind: list[RemoteGraphSegment | SentArguments] = [*builds_on, *received.depends_on]
        groups = [one.group for one in behind if one.group is not None] or [ResultGroup(received.source)]
        self.group: ResultGroup = min(groups, key=lambda group: group.age)
        self.group.results[received.source] = received
        with _tokens_lock:
            for below in builds_on:
                below._above.add(self)
            for sent in received.depends_on:
                sent.group = self.group
                sent.segments = sent.segments or weakref.WeakSet()
                sent.segments.add(self)

    @property
    def arguments(self) -> list[SentArguments]:
        """Arguments that this peer sent, without those of the segments that this segment builds on."""
        return [sent for sent in self._arguments.values() if not sent.is_released]

    @property
    def token(self) -> torch.Tensor:
        """One token for all that it depends on: without it each result would need one for every send node."""
        with _tokens_lock:
            stack = [self]
            while stack:
                segment = stack[-1]
                if segment._token is None:
                    tokens = [below._token for below in segment.builds_on]
                    if any(token is None for token in tokens):
                        stack += [below for below in segment.builds_on if below._token is None]
                        continue
                    tokens += [sent.token for sent in segment.arguments]
                    with torch.enable_grad():
                        segment._token = apply(SegmentToken, *tokens, ANCHOR)
                stack.pop()
            assert self._token is not None
            return self._token


_tokens_lock = threading.RLock()
"""Of the tokens of all segments. Reentrant: a destructor may release arguments."""


def leave_out(sent: SentArguments) -> None:
    """The worker has released arguments. No token is to lead to them any more: their graph may be freed, so
    that a later backward through it would be an error."""
    sent.is_released = True
    if sent.segments is None:
        return
    dropped = []  # graphs are freed without the lock
    with _tokens_lock:
        stack = list(sent.segments)
        while stack:
            segment = stack.pop()
            if segment._token is not None:  # else none above has one
                dropped.append(segment._token)
                segment._token = None
                stack += segment._above


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
