"""Random programs of local and remote operations over three workers: gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.autograd.comparing import Both
from tests.autograd.places import NAMES, SHAPE

Call = Callable[..., Any]

# Each takes the call to use, a worker's name, another's, and two tensors. All tensors have one shape.
OPERATIONS: dict[str, Callable[[Call, str, str, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # local
    "add": lambda call, a, b, x, y: x + y,
    "multiply": lambda call, a, b, x, y: x * y,
    "sine": lambda call, a, b, x, y: torch.sin(x),
    "detach": lambda call, a, b, x, y: x.detach() * y,
    "in place": lambda call, a, b, x, y: (x * 1).mul_(y).add_(1),
    "first row": lambda call, a, b, x, y: x[:1] + torch.tanh(y),
    # one call
    "affine": lambda call, a, b, x, y: call(a, "affine", x),
    "residual": lambda call, a, b, x, y: call(a, "affine", x) + x,
    "argument in place": lambda call, a, b, x, y: call(a, "bump", x),
    "received in place": lambda call, a, b, x, y: call(a, "affine", x).mul_(y),
    "several": lambda call, a, b, x, y: sum_of(call(a, "several", x, y)),
    "one of several": lambda call, a, b, x, y: call(a, "several", x, y)[4],
    "containers": lambda call, a, b, x, y: contained(call(a, "containers", {"list": [x, y, x], "one": (y,)})),
    "shared memory": lambda call, a, b, x, y: halves(call(a, "halves", x, x[0])),
    "transposed": lambda call, a, b, x, y: call(a, "affine", x.t().contiguous().t()),
    "twice": lambda call, a, b, x, y: call(a, "received_twice", x, x),
    "ignored": lambda call, a, b, x, y: call(a, "ignore", x, y),
    "parameter": lambda call, a, b, x, y: call(a, "leaf") * x,
    "constant": lambda call, a, b, x, y: call(a, "constant"),
    "same": lambda call, a, b, x, y: call(a, "same", x),
    "plain": lambda call, a, b, x, y: call(a, "plain", x) * y,
    "no grad inside": lambda call, a, b, x, y: call(a, "no_grad_inside", x),
    "unused": lambda call, a, b, x, y: (call(a, "affine", x), y)[1],
    # state with its graph
    "keep": lambda call, a, b, x, y: call(a, "keep", x),
    "recall": lambda call, a, b, x, y: call(a, "recall", x),
    "recur": lambda call, a, b, x, y: call(a, "recur", x),
    "recur on y": lambda call, a, b, x, y: call(a, "recur", y) * x,
    "recur elsewhere": lambda call, a, b, x, y: call(a, "recur_at", x, b),
    "forget": lambda call, a, b, x, y: call(a, "forget", x),
    # calls that make calls
    "hop": lambda call, a, b, x, y: call(a, "hop", x, [b]),
    "round trip": lambda call, a, b, x, y: call("a", "hop", x, ["b", "c", "a"]),
    "fork": lambda call, a, b, x, y: call(a, "fork_join", x, list(NAMES)),
    "keep elsewhere": lambda call, a, b, x, y: call(a, "keep_at", x, b),
    "recall elsewhere": lambda call, a, b, x, y: call(a, "recall_at", x, b),
    "call itself": lambda call, a, b, x, y: call(a, "call_self", x),
    "keep by calling itself": lambda call, a, b, x, y: call(a, "keep_by_calling_self", x),
    "recursion": lambda call, a, b, x, y: call(a, "recurse", x, 2, b),
}


def sum_of(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    first, second, third, _, fifth = results
    return first + second * third + fifth


def contained(results: dict[str, Any]) -> torch.Tensor:
    product: torch.Tensor = results["sum"] * results["deep"][0]["product"][0]
    return product


def halves(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    whole, row = results
    return whole * row


@dataclass(frozen=True)
class Step:
    operation: str
    worker: str
    other: str
    left: int
    right: int


steps = st.builds(
    Step,
    st.sampled_from(sorted(OPERATIONS)),
    st.sampled_from(NAMES),
    st.sampled_from(NAMES),
    st.integers(0, 30),
    st.integers(0, 30),
)


def compute(program: list[Step], used: list[int]) -> Callable[..., torch.Tensor]:
    """Operands are counted from the latest value, so that long chains are likely."""

    def run(call: Call, *leaves: torch.Tensor) -> torch.Tensor:
        values = list(leaves)
        for step in program:
            x, y = values[-1 - step.left % len(values)], values[-1 - step.right % len(values)]
            value = OPERATIONS[step.operation](call, step.worker, step.other, x, y)
            # Bounded, or chains of products overflow; so that the derivatives stay of the order of one.
            values.append(torch.tanh(value))
        chosen = [values[-1 - index % len(values)] for index in used]
        # Through the first leaf, so that there is always something to differentiate.
        return torch.stack([value.expand(SHAPE) for value in chosen]).sum() + leaves[0].sum()

    return run


programs = given(
    program=st.lists(steps, min_size=1, max_size=8),
    used=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    backward=st.sampled_from(["plain", "plain", "context", "grad", "twice"]),
)


def examples(most: int) -> settings:
    return settings(
        max_examples=most,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@examples(300)
@programs
def test_random_graphs(program: list[Step], used: list[int], backward: str, trio: Both) -> None:
    check(program, used, backward, trio)


def check(program: list[Step], used: list[int], backward: str, trio: Both) -> None:
    trio.reset()
    generator = torch.Generator().manual_seed(len(program))
    made = [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(3)]
    leaves = [made[0].requires_grad_(), made[1].requires_grad_(), made[2]]
    trio.check(compute(program, used), *leaves, backward=backward)
