"""Runs a computation over real workers and in one process, and compares all gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tests.autograd.places import Call, Place

import gradwire as gw

__all__ = ["Both", "assert_close"]

Compute = Callable[..., torch.Tensor]
"""From a way to call places, and leaves, to a scalar."""


def assert_close(found: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    """Equal to 1e-12; none and zeros count as the same only if neither is a value."""
    if found is None or expected is None:
        other = expected if found is None else found
        assert other is None or not other.to_dense().any(), f"{what}: {found} instead of {expected}"
        return
    found, expected = found.to_dense(), expected.to_dense()
    assert found.dtype == expected.dtype, what
    tolerance = 1e-12 if found.dtype in (torch.float64, torch.complex128) else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


class Both:
    """The same places twice: as workers and as the oracle."""

    def __init__(self, workers: Mapping[str, gw.RemoteWorker], oracle: tuple[dict[str, Place], Call]) -> None:
        self.workers = workers
        self.places, self.oracle_call = oracle

    def __getattr__(self, name: str) -> gw.RemoteWorker:
        try:
            return self.workers[name]
        except KeyError:
            raise AttributeError(name) from None

    def call(self, to: str, function: str, *args: object) -> Any:
        return self.workers[to].call(function, *args)

    def reset(self) -> None:
        for worker in self.workers.values():
            worker.reset()
        for place in self.places.values():
            place.kept.clear()
            for parameter in place.parameters.values():
                parameter.grad = None

    # -- gradients

    def remote_gradients(self) -> dict[str, torch.Tensor | None]:
        """Those of all workers' parameters, for the context of the caller."""
        found = {}
        for name, worker in self.workers.items():
            for parameter, gradient in worker.gradients().items():
                found[f"{name}.{parameter}"] = gradient
        return found

    def oracle_gradients(self) -> dict[str, torch.Tensor | None]:
        return {
            f"{name}.{parameter}": tensor.grad
            for name, place in self.places.items()
            for parameter, tensor in place.parameters.items()
        }

    def check_parameters(self) -> None:
        """The gradients of all workers' parameters are those of the oracle's."""
        expected = self.oracle_gradients()
        for name, gradient in self.remote_gradients().items():
            assert_close(gradient, expected[name], name)

    def check(self, compute: Compute, *leaves: torch.Tensor, backward: str = "plain", times: int = 3) -> None:
        """Backpropagates through `compute(call, *leaves)` both ways; results and gradients are equal. So they
        are the third time, when calls have plans."""
        for repetition in range(times):
            if repetition:
                self.reset()
                for one in leaves:
                    one.grad = None
            self._check(compute, *leaves, backward=backward)

    def _check(self, compute: Compute, *leaves: torch.Tensor, backward: str) -> None:
        copies = [one.detach().clone().requires_grad_(one.requires_grad) for one in leaves]
        expected = compute(self.oracle_call, *copies)
        expected.backward()
        if backward == "context":
            with gw.context() as context:
                found = compute(self.call, *leaves)
                assert_close(found.detach(), expected.detach(), "result")
                context.backward(found)
                gradients = [context.gradients().get(one) for one in leaves]
                self.check_parameters()
            assert all(one.grad is None for one in leaves)
        elif backward == "grad":
            found = compute(self.call, *leaves)
            wanted = [one for one in leaves if one.requires_grad]
            partial = torch.autograd.grad(found, wanted, allow_unused=True)
            by_leaf = {id(one): gradient for one, gradient in zip(wanted, partial, strict=True)}
            gradients = [by_leaf.get(id(one)) for one in leaves]
            # Asked for the gradients of these alone.
            assert all(gradient is None for gradient in self.remote_gradients().values())
        else:
            found = compute(self.call, *leaves)
            assert_close(found.detach(), expected.detach(), "result")
            if backward == "twice":
                found.backward(retain_graph=True)
                for one in leaves:
                    one.grad = None
                for worker in self.workers.values():
                    worker.reset()
            found.backward()
            gradients = [one.grad for one in leaves]
            self.check_parameters()
        for index, (gradient, copy) in enumerate(zip(gradients, copies, strict=True)):
            assert_close(gradient, copy.grad, f"leaf {index}")
