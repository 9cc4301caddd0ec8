"""The same functions again and again, with other values, dtypes, shapes, containers and results: what goes by
a plan, and what goes in full between, is as in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.autograd.comparing import assert_close
from tests.autograd.places import by_value

import gradwire as gw
import gradwire_server as gws
from gradwire.api import calls
from gradwire.autograd import propagating

Value = Any

RESULTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Value]] = {
    "nothing": lambda x, y, weight, turn: None,
    "product": lambda x, y, weight, turn: x * y,
    "several": lambda x, y, weight, turn: (x * 2, y, None, turn, "text"),
    "nested": lambda x, y, weight, turn: {"product": x * y, "list": [y * 2, x.sum()]},
    "the argument": lambda x, y, weight, turn: x,
    "the argument twice": lambda x, y, weight, turn: (x, x),
    "parts": lambda x, y, weight, turn: (x.flatten()[:1], x.flatten()[1:]),
    "transposed": lambda x, y, weight, turn: (x * 1).transpose(0, -1),
    "expanded": lambda x, y, weight, turn: x.sum().expand(2, 5),
    "the parameter": lambda x, y, weight, turn: weight,
    "a row of the parameter": lambda x, y, weight, turn: weight[0],
    "weighted": lambda x, y, weight, turn: weight * x.sum(),
    "in place": lambda x, y, weight, turn: (x * 1).mul_(2).add_(1),
    "detached": lambda x, y, weight, turn: x.detach() * 2,
    "by turns": lambda x, y, weight, turn: [x, None, (x, y * 1), [x * y], x.sum()][turn % 5],
}
DTYPES = (torch.float64, torch.float64, torch.float32, torch.complex128)
SHAPES = ((6,), (2, 3), (), (1, 1), (100, 100), (0,))
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly": torch.autograd.detect_anomaly,
}


class Place:
    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.arange(6, dtype=torch.float64).reshape(2, 3))

    def answer(self, kind: str, turn: int, x: Value, y: torch.Tensor, **more: Value) -> Value:
        """A result of some kind, and the keyword arguments in their order."""
        while not isinstance(x, torch.Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return RESULTS[kind](x, y, self.weight, turn), more

    def take_gradient(self) -> torch.Tensor | None:
        """That of the parameter, in the context of the caller."""
        context = gw.current_context()
        gradient = context.gradients().get(self.weight)
        context.zero_grad()
        return gradient


def tensors_in(value: Value) -> list[torch.Tensor]:
    """The tensors in a value, each once."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: dict[int, torch.Tensor] = {}
    if isinstance(value, dict):
        value = list(value.values())
    for item in value if isinstance(value, list | tuple) else ():
        found.update((id(one), one) for one in tensors_in(item))
    return list(found.values())


def structure_of(value: Value) -> Value:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if isinstance(value, dict):
        return [(name, structure_of(item)) for name, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [structure_of(item) for item in value]
    return value


def leaves_of(structure: random.Random, values: random.Random) -> list[torch.Tensor]:
    dtype, shape = structure.choice(DTYPES), structure.choice(SHAPES)
    generator = torch.Generator().manual_seed(values.randrange(1 << 30))
    leaves = [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(3)]
    if structure.random() < 0.2:
        leaves[0] = torch.nn.Parameter(leaves[0])
    return [one.requires_grad_(values.random() < 0.8) for one in leaves]


def copy_of(leaf: torch.Tensor) -> torch.Tensor:
    data = leaf.detach().clone()
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(data, leaf.requires_grad)
    return data.requires_grad_(leaf.requires_grad)


def computed(
    call: Callable[..., Value], leaves: Sequence[torch.Tensor], structure: random.Random, turn: int
) -> Iterator[tuple[str, Value]]:
    """What one program shows: what a test compares, and what it is."""
    x, y, z = leaves
    kind, mode = structure.choice(list(RESULTS)), structure.choice(["", "", "", "", *MODES])
    x = structure.choice([x, x, x * 1, x.view(x.shape), x.transpose(0, -1) if x.dim() else x])
    y = structure.choice([y, y, x])
    argument = structure.choice([x, x, [x], (x, y), {"x": x}, [[x], None]])
    names = structure.sample("abcd", structure.randrange(4))
    more = {name: structure.choice([z, 1.5 * turn, None, "text", turn > 2]) for name in names}
    with MODES[mode]():
        result = call(kind, turn, argument, y, **more)
    yield f"structure of {kind}", structure_of(result)
    results = tensors_in(result)
    yield f"values of {kind}", [one.detach().clone() for one in results]
    if mode in ("no_grad", "inference"):
        return
    results = [one for one in results if one.requires_grad]
    how = structure.randrange(6)
    if how == 0:
        for one in results:
            one.register_hook(lambda gradient: gradient * 2)
    if how == 1 and kind in ("product", "weighted"):
        for one in results[:1]:
            one.mul_(3)
    loss = sum((abs(one) ** 2 + one.real).double().sum() for one in results)
    if not isinstance(loss, torch.Tensor):
        return
    wanted = [one for one in leaves if one.requires_grad]
    if how == 2:
        loss.backward(retain_graph=True)
    if how == 3 and wanted:
        yield "gradients", torch.autograd.grad(loss, wanted[:1], retain_graph=True, allow_unused=True)
    if how == 4 and wanted:
        gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        loss = loss + sum((abs(one) ** 2).double().sum() for one in gradients if one is not None)
    loss.backward()
    yield "gradients of leaves", [one.grad for one in leaves]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("first", [0, 1000])
def test_repeated_calls_are_as_in_one_process(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    went_short = dict.fromkeys(("short_call", "_decode_short", "short_request", "_contributions_in_short"), 0)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            went_short[name] += 1
            return function(*args, **kwargs)

        return count

    for module in (calls, propagating):
        for name in went_short:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    place, oracle = Place(), Place()

    def in_one_process(*args: Value, **kwargs: Value) -> Value:
        memo: dict[int, torch.Tensor] = {}
        arguments = by_value([args, kwargs], memo)
        return by_value(oracle.answer(*arguments[0], **arguments[1]))

    with gws.Worker(place.answer, place.take_gradient) as worker, gw.connect(worker.address) as remote:
        for seed in range(first, first + 500):
            same = random.Random(seed).randrange(25) + first
            turn = seed % 5
            leaves = leaves_of(random.Random(same), random.Random(seed))
            copies = [copy_of(one) for one in leaves]
            oracle.weight.grad = None
            expected = list(computed(in_one_process, copies, random.Random(same), turn))
            with gw.context() if seed % 3 == 0 else nullcontext():
                found = list(computed(remote.answer, leaves, random.Random(same), turn))
                assert_close(remote.take_gradient(), oracle.weight.grad, f"the parameter, seed {seed}")
            assert [what for what, _ in found] == [what for what, _ in expected]
            for (what, one), (_, other) in zip(found, expected, strict=True):
                if what.startswith("structure"):
                    assert one == other, f"{what}, seed {seed}"
                else:
                    for tensor, right in zip(one, other, strict=True):
                        assert_close(tensor, right, f"{what}, seed {seed}")
    assert min(went_short.values()) > 50, went_short


def test_backwards_of_contexts_go_in_short_through_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[bool] = []
    short_request = propagating.short_request

    def remember(*args: Any, collect: bool, **kwargs: Any) -> Any:
        collected.append(collect)
        return short_request(*args, collect=collect, **kwargs)

    monkeypatch.setattr(propagating, "short_request", remember)
    weights = [torch.arange(1.0, 4.0, requires_grad=True), torch.arange(2.0, 5.0, requires_grad=True)]

    def last(x: torch.Tensor) -> torch.Tensor:
        return (x * weights[1]).sin()

    def gradients_of(index: int) -> torch.Tensor | None:
        return gw.current_context().gradients().get(weights[index])

    with gws.Worker(last, gradients_of) as end:

        def first(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = gw.connect(end.address).last(x * weights[0])
            return result + x

        with gws.Worker(first, gradients_of) as begin, gw.connect(begin.address) as worker:
            for turn in range(5):
                x = torch.tensor([1.0, turn, -2.0], requires_grad=True)
                twin = x.detach().clone().requires_grad_()
                copies = [weight.detach().clone().requires_grad_() for weight in weights]
                (torch.sin(twin * copies[0] * copies[1]) + twin).sum().backward()
                with gw.context() as context:
                    context.backward(worker.first(x).sum())
                    found = [context.gradients()[x], worker.gradients_of(0)]
                    found += [gw.connect(end.address).gradients_of(1)]
                for one, other in zip(found, (twin, *copies), strict=True):
                    assert_close(one, other.grad, f"turn {turn}")
                assert x.grad is None
    assert collected == [True] * 8  # all but the first of each link, which does not know of plans yet
