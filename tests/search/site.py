"""What a worker of a random program serves, written so that it also runs in one process.

Every function takes two tensors (or refs to such), the name of a state, and the name of another worker. It
uses what it needs of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from tests.search.local import ROWS, SHAPE, bounded, dense, failing_in_backward, integers, sparse, with_hook

import gradwire as gw

__all__ = ["CALLING", "NAMES", "STATEFUL", "STATELESS", "Argument", "Calls", "Cell", "Site", "single"]

NAMES = ("a", "b", "c")


class Calls(Protocol):
    """The way from one worker to others."""

    def call(self, to: str, function: str, *args: object) -> Any: ...

    def remote(self, to: str, function: str, *args: object) -> Any:
        """A ref to the result, which stays there."""

    def call_back(self, function: str, *args: object) -> Any:
        """Calls the one who called."""

    def gradient_apart(self, work: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor | None:
        """The gradient for x of what is computed, by a pass of the worker's own that leaves no trace."""


Several = tuple[torch.Tensor, ...]


class Ref(Protocol):
    """To a value that stays on a worker."""

    def fetch(self) -> torch.Tensor | Several: ...


Argument = torch.Tensor | Several | Ref
"""What a function gets: with a ref to what is on this very worker, the value itself, which may be several."""


def single(value: Argument) -> torch.Tensor:
    """The tensor, the first of several, or what a ref refers to."""
    if not isinstance(value, torch.Tensor | tuple):
        value = value.fetch()
    return value[0] if isinstance(value, tuple) else value


def _embedding(table: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ROWS, table, sparse=True)


class Site:
    """The functions of one worker: every public method."""

    def __init__(self, name: str, calls: Calls) -> None:
        self.name = name
        self._calls = calls
        seed = 10 * NAMES.index(name)
        self.weights = integers(seed, *SHAPE).requires_grad_()
        self.matrix = integers(seed + 1, SHAPE[1], SHAPE[1]).requires_grad_()
        self.table = integers(seed + 2, *SHAPE).requires_grad_()
        self.states: dict[str, torch.Tensor] = {}

    @property
    def functions(self) -> list[Callable[..., Any]]:
        public = (name for name in vars(Site) if not name.startswith("_"))
        return [getattr(self, name) for name in public if callable(vars(Site)[name])]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {"weights": self.weights, "matrix": self.matrix, "table": self.table}

    # -- without state

    def scale(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        return dense(single(x)) * self.weights

    def weigh(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        return bounded(dense(single(x)) @ self.matrix) + dense(single(y))

    def several(self, x: Argument, y: Argument, key: str, other: str) -> Several:
        """One depends on each argument alone, one on none."""
        x, y = dense(single(x)), dense(single(y))
        return x * y, y * self.weights, x * 2, y.detach() + 1, torch.arange(3)

    def same(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        return single(x)

    def same_twice(self, x: Argument, y: Argument, key: str, other: str) -> Several:
        x = single(x)
        return x, x

    def views(self, x: Argument, y: Argument, key: str, other: str) -> Several:
        z = dense(single(x)) * dense(single(y))
        return z, z.view(3, 2).view(2, 3), z[:1]

    def in_place(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        x = dense(single(x))
        if x.is_leaf or x._is_view():  # a parameter stays as it is, and so do aliases
            x = x * 1
        x.mul_(self.weights)
        x += 1
        return x

    def no_grad_inside(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        x = dense(single(x))
        with torch.no_grad():
            factor = bounded(x * 2)
        return factor * x

    def constant(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """Requires grad although it uses no argument."""
        return torch.ones(SHAPE, dtype=torch.float64) @ self.matrix

    def parameter(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        return self.weights

    def embed(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """Its gradients are sparse, for the argument and for the table."""
        return _embedding(single(x)) * _embedding(self.table)

    def parameter_table(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        return self.table

    def embed_at(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """A sparse gradient for another worker's parameter."""
        return _embedding(self._calls.call(other, "parameter_table", x, y, key, self.name)) * dense(single(x))

    def to_sparse(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        return sparse(dense(single(x)) * self.weights)

    def sparse_twice(self, x: Argument, y: Argument, key: str, other: str) -> Several:
        x = sparse(single(x))
        return x * 2, x.to_dense() * self.weights

    def penalty(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """A gradient that is taken on the worker, through a call of its own."""
        x = dense(single(x))
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x * self.weights
        out = self._calls.call(other, "weigh", x * x, x, key, self.name)
        (gradient,) = torch.autograd.grad((out * self.weights).sum(), [x], create_graph=True)
        return bounded(gradient) * x

    def pass_inside(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """A whole pass within a call, with a context of its own."""
        x = dense(single(x))
        z = x.detach().requires_grad_()

        def work() -> torch.Tensor:
            with torch.enable_grad():
                result: torch.Tensor = self._calls.call(other, "weigh", z * z, z, key, self.name)
                return (result * self.weights).sum()

        gradient = self._calls.gradient_apart(work, z)
        assert gradient is not None
        return bounded(gradient) * x

    def checkpointed(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """Calls another worker, and does so again in backward."""
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(
            lambda z: self._calls.call(other, "weigh", z * z, z, key, self.name),
            dense(single(x)) * self.weights,
            use_reentrant=False,
        )
        return result

    def fail_in_backward(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        return failing_in_backward(dense(single(x)) * self.weights)

    def hooked(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        z = dense(single(x)) * self.weights
        return with_hook(z, lambda gradient: gradient * 2)

    # -- with states, which keep their graph

    def keep(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        kept = dense(single(x)) * self.weights
        if key in self.states:
            kept = kept + dense(self.states[key])
        self.states[key] = bounded(kept)
        return self.states[key] * 2

    def recur(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        before = self.states.get(key)
        x = dense(single(x))
        self.states[key] = bounded(x * x if before is None else x + dense(before) @ self.matrix)
        return self.states[key] * self.weights

    def recur_alike(self, x: Argument, y: Argument, key: str, other: str) -> Several:
        """The state itself, and something that does not depend on it."""
        self.recur(x, y, key, other)
        return self.states[key], dense(single(y)) * self.weights

    def recall(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        x = dense(single(x))
        return x * dense(self.states[key]) if key in self.states else x * self.weights

    def forget(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """The state without the argument: what the result reaches came with earlier calls."""
        return dense(self.states.pop(key)) * 2 if key in self.states else self.constant(x, y, key, other)

    def server_call(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """A part of one state goes into another."""
        p, q = (dense(self.states.get(name, self.weights)) for name in ("p", "q"))
        x = dense(single(x))
        self.states[key] = bounded(torch.cat([x[:1] * p[1:], q[:1]]))
        return p[1:] * x

    def first_row(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """Touches a part of a state."""
        before = dense(self.states.get(key, self.weights))
        x = dense(single(x))
        self.states[key] = torch.cat([bounded(x[:1] * before[:1]), before[1:]])
        return before[1:] * x

    def bump(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """Modifies a state in place."""
        if key in self.states and not self.states[key].is_leaf:
            self.states[key].add_(dense(single(x)))
        return dense(single(x)) * 2

    def hook_state(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """Linear, as what a gradient is added up from may come by and by."""
        state = self.states.get(key)
        if state is not None:
            with_hook(state, lambda gradient: gradient * 2)
        return dense(single(x)) * 2

    def keep_sparse(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        before = self.states.get(key)
        self.states[key] = sparse(single(x)) * 2
        return sparse(single(y)) if before is None else sparse(before)

    # -- by calling others

    def hop(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        z = dense(single(x)) * self.weights
        result: torch.Tensor = self._calls.call(other, "weigh", bounded(z), y, key, self.name)
        return z + result

    def diamond(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        z = bounded(dense(single(x)) * self.weights)
        ways = [self._calls.call(name, "recur", z, y, key, other) for name in NAMES]
        joined: torch.Tensor = self._calls.call(other, "weigh", ways[0] * ways[1], ways[2], key, self.name)
        return joined

    def recur_at(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """State at the other worker."""
        z = bounded(dense(single(x)) @ self.matrix)
        result: torch.Tensor = self._calls.call(other, "recur", z, y, key, self.name)
        return result * self.weights

    def recur_here_and_at(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        here = self.recur(x, y, key, other)
        result: torch.Tensor = self._calls.call(other, "recur", here, y, key, self.name)
        return result

    def keep_received(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """What is kept is a result of another worker's state."""
        self.states[key] = self._calls.call(other, "recur", x, y, key, self.name)
        return self.states[key] * self.weights

    def recurse(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """To and fro between two workers, until the name of the state is used up."""
        z = dense(single(x)) * self.weights
        if len(key) > 3:
            return z
        result: torch.Tensor = self._calls.call(other, "recurse", bounded(z), y, key + "x", self.name)
        return z + result

    def call_itself(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        z: torch.Tensor = self._calls.call(
            self.name, "keep", bounded(dense(single(x)) * self.weights), y, key, other
        )
        return z + dense(single(x))

    def ask_back(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """The other worker calls this one back."""
        z: torch.Tensor = self._calls.call(
            other, "answer", bounded(dense(single(x)) * self.weights), y, key, other
        )
        return z

    def answer(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        z: torch.Tensor = self._calls.call_back("recur", dense(single(x)) * self.weights, y, key, self.name)
        return z * self.weights

    def refer(self, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """By way of a ref to a result that stays at the other worker, and is an argument there."""
        ref = self._calls.remote(other, "recur", x, y, key, self.name)
        result: torch.Tensor = self._calls.call(other, "weigh", ref, y, key, self.name)
        return bounded(result) * single(ref)

    # -- about the worker itself

    def detach_state(self, key: str) -> None:
        if key in self.states:
            self.states[key] = self.states[key].detach()

    def reset_state(self, key: str) -> None:
        self.states.pop(key, None)

    def detach_all(self) -> None:
        for key in list(self.states):
            self.detach_state(key)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Those of the caller's context."""
        found = gw.current_context().gradients()
        return {name: found.get(parameter) for name, parameter in self.parameters.items()}

    def clear(self) -> None:
        gw.current_context().zero_grad()

    def reset(self) -> None:
        self.states.clear()
        gw.current_context().zero_grad()

    def meet(self, addresses: dict[str, str]) -> None:
        """Learns where the other workers are."""
        self._calls.addresses.update(addresses)  # type: ignore[attr-defined] # only of real workers


class Cell(torch.nn.Module):
    """A module that a program makes on a worker, with a state of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(integers(100 + NAMES.index(name), *SHAPE))
        self._state: torch.Tensor | None = None

    def forward(self, x: Argument, y: Argument) -> torch.Tensor:
        state = dense(single(x)) * self.weights
        self._state = bounded(state if self._state is None else state + self._state)
        return self._state * dense(single(y))

    def detach_state(self) -> None:
        if self._state is not None:
            self._state = self._state.detach()

    def gradient(self) -> torch.Tensor | None:
        return gw.current_context().gradients().get(self.weights)


STATELESS = (
    "scale",
    "weigh",
    "several",
    "same",
    "same_twice",
    "views",
    "in_place",
    "no_grad_inside",
    "constant",
    "parameter",
    "embed",
    "to_sparse",
    "sparse_twice",
    "hooked",
    "fail_in_backward",
)
STATEFUL = (
    "keep",
    "recur",
    "recur_alike",
    "recall",
    "forget",
    "server_call",
    "first_row",
    "bump",
    "hook_state",
    "keep_sparse",
    "cell",
)
"""With "cell", which is the program's own module on the worker."""
CALLING = (
    "hop",
    "diamond",
    "recur_at",
    "recur_here_and_at",
    "keep_received",
    "recurse",
    "call_itself",
    "ask_back",
    "refer",
    "embed_at",
    "penalty",
    "pass_inside",
    "checkpointed",
)
