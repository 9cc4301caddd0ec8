"""Weight versions: a backward must meet the parameters of its forward, unless it was said otherwise."""

from __future__ import annotations

import pytest
import torch
from tests.training import models
from tests.training.conftest import Served

import gradwire as gw
import gradwire_server as gws

X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)


def step(module: object, lr: float = 0.1) -> None:
    """Another pass over the module, up to the step."""
    with gw.context() as context:
        context.backward(module(X).sum())  # type: ignore[operator]
        gw.optim.DistributedOptimizer(torch.optim.SGD, [module], lr=lr).step(context)  # type: ignore[list-item]


def test_a_backward_after_a_step_names_the_parameters(a: Served) -> None:
    layer = a.handle.create("Layer", 4)
    loss = layer(X).sum()
    step(layer)
    with pytest.raises(gw.StaleParameters, match=r"Layer: weight, bias.*stale=\"allow\"") as caught:
        loss.backward()
    assert caught.value.parameters == ("weight", "bias")
    layer(X).sum().backward()  # the module is as usable as before


def test_a_step_that_was_refused_makes_nothing_stale(a: Served) -> None:
    layer = a.handle.create("Layer", 4)
    opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
    loss = layer(X).sum()
    with pytest.raises(gw.StepRefused, match="no gradients"):
        opt.step()
    loss.backward()
    opt.step()


def test_modules_that_were_not_stepped_are_not_stale(a: Served, b: Served) -> None:
    stepped, other = a.handle.create("Layer", 4, seed=1), a.handle.create("Layer", 4, seed=2)
    elsewhere = b.handle.create("Layer", 4, seed=3)
    loss = elsewhere(other(X)).sum()
    step(stepped)
    loss.backward()


def test_in_a_chain_the_stale_one_is_named(a: Served, b: Served) -> None:
    fresh, stale = a.handle.create("Layer", 4), b.handle.create("Layer", 4)
    loss = fresh(stale(X)).sum()
    step(stale)
    with pytest.raises(gw.StaleParameters) as caught:
        loss.backward()
    assert "b" in str(caught.value.worker)


def test_it_can_be_allowed_for_a_module(a: Served) -> None:
    layer, whole = a.handle.create("Layer", 4, stale="allow"), models.Layer(4)
    x = X.clone().requires_grad_()
    loss = layer(x).sum()
    step(layer, lr=1.0)
    loss.backward()
    # The gradient is that of the forward's activations through the weights of now.
    out = torch.tanh(X @ whole.weight + whole.bias)
    now = layer.state_dict()["weight"]
    assert torch.allclose(x.grad, ((1 - out**2) @ now.T).detach())


def test_loading_a_state_makes_a_backward_stale_as_in_torch(a: Served) -> None:
    layer = a.handle.create("Layer", 4)
    loss = layer(X).sum()
    layer.load_state_dict(models.Layer(4, seed=9).state_dict())
    with pytest.raises(gw.StaleParameters):
        loss.backward()


def test_shared_instances_are_watched_however_they_are_called(a: Served) -> None:
    before = models.shared.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    try:
        for loss in (a.handle.get("shared")(X).sum(), a.handle.shared(X).sum()):
            step(a.handle.get("shared"))
            with pytest.raises(gw.StaleParameters, match="weight, bias"):
                loss.backward()
    finally:
        models.shared.load_state_dict(before)


def test_an_error_says_which_type_it_is(a: Served) -> None:
    layer = a.handle.create("Layer", 4)
    loss = layer(X).sum()
    step(layer)
    with pytest.raises(RuntimeError):  # as torch's own check of versions does
        loss.backward()


class Shared(torch.nn.Module):
    """Has a module of another as its own."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self.inner = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def weigh_twice(layer: models.Layer, x: torch.Tensor) -> torch.Tensor:
    return layer(layer(x))


def test_a_module_that_shares_parameters_with_one_that_allows_it_is_watched_all_the_same() -> None:
    with gws.Worker(models.Layer, Shared) as served, gw.connect(served.address) as worker:
        strict = worker.create("Layer", 4)
        lenient = worker.create("Shared", strict, stale="allow")
        loss, other = strict(X).sum(), lenient(X).sum()
        step(lenient)
        other.backward()
        with pytest.raises(gw.StaleParameters, match="Layer"):
            loss.backward()


def test_modules_that_are_arguments_are_watched() -> None:
    with gws.Worker(models.Layer, weigh_twice) as served, gw.connect(served.address) as worker:
        layer = worker.create("Layer", 4)
        loss = worker.weigh_twice(layer, X).sum()
        step(layer)
        with pytest.raises(gw.StaleParameters, match="Layer: weight, bias"):
            loss.backward()
