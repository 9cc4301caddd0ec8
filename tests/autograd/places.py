"""What the workers of these tests do, written so that it also runs in one process: that is the oracle.

A `Place` has parameters, keeps state, and calls other places. A worker serves one, and its calls go to other
workers; the oracle's calls are plain function calls on copies, because calls pass by value.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gradwire as gw
from gradwire.peers.forking import live_peers
from gradwire.runtime.scope import current_scope

__all__ = ["NAMES", "SHAPE", "Place", "by_value", "oracle", "remote_place"]

NAMES = ("a", "b", "c")
SHAPE = (2, 3)

Call = Callable[..., Any]


class Place:
    """The functions of one worker: every public method."""

    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self._call = call
        generator = torch.Generator().manual_seed(NAMES.index(name))

        def parameter(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator, dtype=torch.float64)
            return made.requires_grad_()

        self.weight = parameter(SHAPE[1], SHAPE[1])
        self.bias = parameter(SHAPE[1])
        self.table = parameter(5, SHAPE[1])
        self.kept: dict[str, torch.Tensor] = {}

    @property
    def functions(self) -> list[Callable[..., Any]]:
        public = (name for name in vars(Place) if not name.startswith("_"))
        return [getattr(self, name) for name in public if callable(vars(Place)[name])]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "bias": self.bias, "table": self.table}

    # -- functions of tensors

    def affine(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) + self.bias

    def several(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of these, some are used and some are not; one requires no grad; one is of integers."""
        return torch.sin(x) * self.bias, x * y, y.detach() + 1, torch.arange(3), torch.exp(-y * y)

    def containers(self, items: dict[str, Any]) -> dict[str, Any]:
        total = sum(items["list"], items["one"][0])
        return {"sum": total * self.bias, "deep": [{"product": (total * items["one"][0],)}], "n": 1}

    def keep(self, x: torch.Tensor, key: str = "") -> torch.Tensor:
        """Keeps state with its graph."""
        kept = torch.tanh(x @ self.weight)
        if key in self.kept:
            kept = kept + self.kept[key]
        self.kept[key] = kept
        return kept * 1.5

    def recall(self, x: torch.Tensor, key: str = "") -> torch.Tensor:
        return x * self.kept[key] if key in self.kept else x * self.bias

    def recall_both(self, x: torch.Tensor, key: str, other: str) -> torch.Tensor:
        return x * self.kept[key] * self.kept[other]

    def forget(self, x: torch.Tensor, key: str = "") -> torch.Tensor:
        """The state without the argument: what the result reaches came with an earlier call."""
        del x
        return self.kept.pop(key) * 2 if key in self.kept else self.constant()

    def keep_and_return(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["returned"] = x @ self.weight
        return self.kept["returned"]

    def recur(self, x: torch.Tensor, key: str = "") -> torch.Tensor:
        """One step of a recurrent network whose state stays here, with its graph."""
        before = self.kept.get(key)
        state = x if before is None else x + before @ self.weight
        self.kept[key] = torch.tanh(_Counted.apply(state))
        return self.kept[key] * self.bias

    def recur_beside(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        """Does not use one of its arguments."""
        del unused
        before = self.kept.get("")
        self.kept[""] = x + 1 if before is None else x + before
        return x * 3 if before is None else before * x

    def recur_twice(self, x: torch.Tensor, key: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """The state itself, and something else."""
        self.recur(x, key)
        return self.kept[key], torch.sin(x) * self.bias

    def recur_at(self, x: torch.Tensor, to: str, key: str = "") -> torch.Tensor:
        """The state stays at a third place."""
        result: torch.Tensor = self._call(to, "recur", torch.sin(x @ self.weight), key)
        return result * self.bias

    def recur_here_and_at(self, x: torch.Tensor, to: str, key: str = "") -> torch.Tensor:
        """State here and there."""
        result: torch.Tensor = self._call(to, "recur", self.recur(x, key), key)
        return result

    def times_cached(self, x: torch.Tensor) -> torch.Tensor:
        """What is kept was made once, and saves nothing for backward."""
        self.kept.setdefault("cached", self.bias + 1)
        return x * self.kept["cached"]

    def in_slots(self, x: torch.Tensor, write: str | None, beside: str, answer: str) -> torch.Tensor:
        """Keeps the argument in one slot, with what is in another, and answers with what is in a third."""
        if write is not None:
            self.kept[write] = x * 3 + self.kept[beside] if beside in self.kept else x * 2
        return x * 7 + self.kept[answer] * 2 if answer in self.kept else x * 5

    def keep_answer(self, x: torch.Tensor, to: str) -> torch.Tensor:
        """The state is from now on what another place, or this one, answers."""
        self.kept[""] = self._call(to, "recur", x)
        return self.kept[""] * self.bias

    def detach_kept(self, key: str = "") -> None:
        if key in self.kept:
            self.kept[key] = self.kept[key].detach()

    def hook_kept(self, key: str = "") -> None:
        """A hook that is not linear: it has to see the whole gradient, once."""
        self.kept[key].register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))

    def counted(self) -> int:
        """How many recurrent steps ran backward since the last time."""
        global _backwards
        counted, _backwards = _backwards, 0
        return counted

    def bump_kept(self) -> None:
        self.kept["returned"].mul_(2)

    def bump(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(self.bias)
        x += 1
        return x

    def constant(self) -> torch.Tensor:
        """Requires grad although no argument does."""
        return torch.ones(SHAPE, dtype=torch.float64) @ self.weight

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach() * 2

    def leaf(self) -> torch.Tensor:
        """A parameter itself."""
        return self.bias

    def fresh_leaf(self) -> torch.Tensor:
        return torch.ones(SHAPE, dtype=torch.float64, requires_grad=True)

    def same(self, x: torch.Tensor) -> torch.Tensor:
        """The argument itself."""
        return x

    def own_function(self, x: torch.Tensor) -> torch.Tensor:
        """The result of a function that is not torch's own."""
        result: torch.Tensor = _Counted.apply(x)
        return result

    def keep_sum(self, x: torch.Tensor) -> torch.Tensor:
        """A sum that stays here; of any layout."""
        self.kept["sum"] = self.kept["sum"] + x if "sum" in self.kept else x
        return self.kept["sum"]

    def ignore(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        del y
        return x * 3

    def no_grad_inside(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = x * 2
        return factor * x

    def received_twice(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 2 + y * y

    def halves(self, x: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns tensors that share memory."""
        y = x * self.bias + part.sum()
        return y, y[0]

    def sparse_embedding(self, indices: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        embed = torch.nn.functional.embedding
        return embed(indices, self.table, sparse=True) * embed(indices, table, sparse=True)

    def weigh_complex(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(self.weight, self.weight.flip(0)) * x

    def mixed(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.double() * self.bias, (y * 2).to(torch.float32)

    def dot(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.bias).sum()

    def empty(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.bias

    def chain_matmul(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.linalg.multi_dot(tensors)

    def stacked(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tensors)

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(x, 2))

    def checkpointed(self, x: torch.Tensor, to: str) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(
            lambda y: self._call(to, "affine", torch.sin(y)), x, use_reentrant=False
        )
        return result

    # -- functions that call other places

    def hop(self, x: torch.Tensor, route: Sequence[str]) -> torch.Tensor:
        """Along a route of places, with a residual path at each."""
        y = self.affine(x)
        if route:
            y = y + self._call(route[0], "hop", y * 0.5, list(route[1:]))
        return y

    def fork_join(self, x: torch.Tensor, ways: Sequence[str]) -> torch.Tensor:
        return torch.stack([self._call(way, "affine", x) for way in ways]).sum(0) * self.bias

    def keep_at(self, x: torch.Tensor, to: str) -> torch.Tensor:
        """State at a third place, from arguments that were computed here."""
        result: torch.Tensor = self._call(to, "keep", torch.sin(x @ self.weight))
        return result

    def recall_at(self, x: torch.Tensor, to: str) -> torch.Tensor:
        result: torch.Tensor = self._call(to, "recall", x * self.bias)
        return result

    def call_self(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._call(self.name, "affine", x * self.bias)

    def keep_by_calling_self(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._call(self.name, "keep", torch.sin(x) * self.bias)
        return result

    def recurse(self, x: torch.Tensor, depth: int, other: str) -> torch.Tensor:
        """To and fro between two places."""
        if depth == 0:
            return x * self.bias
        return self.affine(x) + self._call(other, "recurse", x * 0.9, depth - 1, self.name)

    # -- failures

    def raising(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.bias
        raise ValueError(f"no use for {tuple(y.shape)}")

    def raising_in_backward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Raising.apply(x * self.bias)
        return result

    def slow(self, x: torch.Tensor) -> torch.Tensor:
        """In backward, until nobody waits any more."""
        result: torch.Tensor = _Slow.apply(x)
        return result

    def root_of_minus_one_times(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(-1 - x) * self.bias

    # -- modes, contexts, and backward on the worker

    def autocast_state(self) -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.float()

    def step_alone(self, x: torch.Tensor) -> bool:
        """Runs backward itself."""
        self.affine(x).sum().backward()
        alone = self.weight.grad is not None
        self.weight.grad = self.bias.grad = None
        return alone

    def penalty(self, x: torch.Tensor, through: str | None = None) -> torch.Tensor:
        out = self.affine(x) if through is None else self._call(through, "affine", x)
        (gradient,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
        return (gradient**2).sum() + out.sum()

    def grad_in_backward(self, x: torch.Tensor, to: str) -> torch.Tensor:
        """Its backward differentiates something else, which another place computes."""

        def inner() -> torch.Tensor:
            other = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self._call(to, "affine", other).sum(), [other])
            return gradient

        result: torch.Tensor = _Inner.apply(x * self.bias, inner)
        return result

    def backward_in_backward(self, x: torch.Tensor) -> torch.Tensor:
        """Its backward backpropagates something else, down to the argument."""
        other = torch.sin(x).sum()

        def inner() -> torch.Tensor:
            other.backward(retain_graph=True)
            return torch.ones_like(x)

        result: torch.Tensor = _Inner.apply(x * self.bias, inner)
        return result

    def relay(self, to: str, function: str, *args: object) -> Any:
        return self._call(to, function, *args)

    def context_of(self, route: Sequence[str]) -> list[str]:
        """The contexts that served functions see along a route."""
        here = str(gw.current_context().id)
        return [here, *(self._call(route[0], "context_of", list(route[1:])) if route else [])]

    # -- about the place itself

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Those of the caller's context."""
        found = gw.current_context().gradients()
        return {name: found.get(parameter) for name, parameter in self.parameters.items()}

    def reset(self) -> None:
        self.kept.clear()
        gw.current_context().zero_grad()

    def meet(self, addresses: dict[str, str]) -> None:
        """Learns where the other places are."""
        _addresses.update(addresses)

    def held(self) -> dict[str, int]:
        """What the process holds: for tests that look for leaks."""
        return held_here()


_backwards = 0


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        global _backwards
        _backwards += 1
        return gradient


class _Inner(torch.autograd.Function):
    """What a function gives, times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inner: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.inner = inner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            return gradient * ctx.inner(), None


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ValueError("the backward of this function always fails")


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # Not gw.cancelled(), which is true as soon as the time is up here: the answer would race with the
        # requester's own clock.
        server_call = current_scope().server_call
        give_up_at = time.monotonic() + 30
        while not (server_call is not None and server_call.cancelled) and time.monotonic() < give_up_at:
            time.sleep(0.001)
        return gradient


_addresses: dict[str, str] = {}


def remote_place(name: str) -> Place:
    """A place whose calls go to other workers."""

    def call(to: str, function: str, *args: object) -> Any:
        return gw.connect(_addresses[to]).call(function, *args)

    return Place(name, call)


def by_value(value: Any, memo: dict[int, torch.Tensor] | None = None) -> Any:
    """A copy of tensors in containers. One that comes twice is copied once."""
    memo = {} if memo is None else memo
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            memo[id(value)] = value.clone()
        return memo[id(value)]
    if isinstance(value, list):
        return [by_value(item, memo) for item in value]
    if isinstance(value, tuple):
        return tuple(by_value(item, memo) for item in value)
    if isinstance(value, dict):
        return {key: by_value(item, memo) for key, item in value.items()}
    return value


def oracle() -> tuple[dict[str, Place], Call]:
    """The same places in one process, and the way to call them."""
    places: dict[str, Place] = {}

    def call(to: str, function: str, *args: object) -> Any:
        return by_value(getattr(places[to], function)(*by_value(args)))

    places.update({name: Place(name, call) for name in NAMES})
    return places, call


def held_here() -> dict[str, int]:
    """Contexts, messages, live tensors, threads and resident kilobytes of this process."""
    gc.collect()
    stores = [node.engine.container for node in list(live_peers)]
    contexts = [context for store in stores for context in store.contexts()]
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "contexts": len(contexts),
        "arguments": sum(len(store._arguments) for store in stores),
        "results": sum(len(store._results) for store in stores),
        "tensors": sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)),
        "threads": threading.active_count(),
        "kilobytes": pages * math.ceil(4096 / 1024),
    }
