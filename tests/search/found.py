"""Programs that once differed from one process, as small as they could be made."""

from __future__ import annotations

from tests.search.steps import Backward, Call, Local, Operand, Program

__all__ = ["FOUND"]

X, Y, Z = Operand(-1), Operand(-2), Operand(-3)
"""Leaves."""

FOUND: dict[str, Program] = {
    "a result that comes back to its sender reaches earlier arguments": (
        Call(0, "b", "keep_received", Y, Y, "q", "b"),
        Call(1, "b", "keep_received", X, X, "q", "b"),
        Call(2, "b", "keep_received", X, X, "q", "b"),
        Backward(3, "grad", (Operand(2),), (Y,), retain_graph=True),
    ),
    "the same by way of a state that three functions touch": (
        Call(0, "a", "cell", X, Z, "p", "a"),
        Call(1, "a", "first_row", Operand(0), X, "p", "a"),
        Call(2, "a", "ask_back", X, X, "p", "a"),
        Backward(3, "grad", (Operand(2),), (Z,), retain_graph=True),
    ),
    "the same in another context": (
        Call(0, "c", "ask_back", X, Y, "q", "c", context=1),
        Call(1, "c", "ask_back", X, X, "q", "a"),
        Backward(2, "plain", (Operand(1),), (), retain_graph=True),
    ),
    "the same by way of a ref": (
        Call(0, "a", "refer", X, X, "q", "a", context=1),
        Call(1, "a", "ask_back", X, Y, "q", "c"),
        Backward(2, "plain", (Operand(1),), (), retain_graph=True),
    ),
    "two contexts share a state that a worker keeps by calling itself": (
        Call(0, "a", "recur_here_and_at", X, X, "p", "a", context=1),
        Call(1, "a", "recur_here_and_at", X, X, "p", "a"),
        Backward(2, "plain", (Operand(1),), (), retain_graph=True),
    ),
    "a result that was spent is an argument that is not used": (
        Call(0, "c", "first_row", Z, X, "p", "c"),
        Call(1, "c", "first_row", X, X, "p", "c"),
        Backward(2, "plain", (Operand(1),), (), retain_graph=False),
        Call(3, "c", "first_row", X, Operand(1), "p", "c"),
        Backward(4, "plain", (Operand(3),), (), retain_graph=True),
    ),
    "the same where a suspended backward waits for other results": (
        Call(0, "a", "server_call", X, Z, "p", "c"),
        Call(1, "a", "server_call", X, X, "q", "c"),
        Backward(2, "plain", (Operand(1),), (), retain_graph=False),
        Call(3, "a", "recall", X, Operand(1), "q", "a"),
        Call(4, "a", "server_call", Z, Operand(3), "p", "c"),
        Backward(5, "plain", (Operand(4),), (), retain_graph=True),
    ),
    "a sparse argument of a worker that calls another": (
        Local(0, "to sparse", X, X),
        Call(1, "a", "recur_here_and_at", X, Operand(0), "q", "c"),
        Backward(2, "plain", (Operand(1),), (), retain_graph=True),
    ),
    "a sparse result that is sent on": (
        Call(0, "c", "keep_sparse", X, X, "p", "c"),
        Call(1, "c", "weigh", X, Operand(0), "p", "c"),
        Backward(2, "plain", (Operand(1),), (), retain_graph=True),
    ),
    "a pass within a call of a worker that calls itself": (Call(0, "c", "pass_inside", Y, X, "p", "c"),),
    "a leaf twice among the roots": (
        Backward(0, "context", (X, X), (), retain_graph=True, context=1, direct=True),
    ),
    "a gradient that a worker took through a call stays there, and is fetched in another context": (
        Call(0, "a", "first_row", Z, X, "q", "c", mode="remote"),
        Call(1, "a", "penalty", Operand(0), X, "p", "a", context=1, mode="remote"),
        Backward(2, "plain", (Operand(1),), (), retain_graph=True),
    ),
    "a ref has its graph for a backward after each fetch": (
        Call(0, "b", "keep_received", X, X, "q", "c", mode="remote"),
        Backward(1, "plain", (Operand(0),), (), retain_graph=False),
        Backward(2, "plain", (Operand(0),), (), retain_graph=False),
    ),
    "a gradient that was recorded in the context of a fetch": (
        Call(0, "c", "in_place", X, X, "p", "c", mode="remote"),
        Backward(1, "grad", (Operand(0),), (X,), retain_graph=True, create_graph=True, context=1),
        Backward(2, "plain", (Operand(1),), (), retain_graph=True),
    ),
}
