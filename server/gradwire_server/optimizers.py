"""Optimizers beside the parameters that they step: prepare, then commit, one step at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

import gradwire
from gradwire.errors import StepRefused, WrongArguments
from gradwire_server.objects import Held, Objects
from gradwire_server.registry import Registry

__all__ = ["Optimizers", "WorkerOptimizer"]


class Optimizers:
    """Makes the optimizers of one worker."""

    def __init__(self, registry: Registry, objects: Objects) -> None:
        self._registry = registry
        self._objects = objects

    def make(
        self, uid: str, class_name: str, defaults: dict[str, Any], groups: list[dict[str, Any]], resume: bool
    ) -> WorkerOptimizer:
        """An optimizer over the parameters of modules.

        Each group has its modules under "modules", and options of its own beside them. With `resume` it
        goes on from what was last known of the optimizer `uid` here, if its modules have names.
        """
        optimizer_class = self._find(class_name)
        held_groups = [[self._held(module) for module in group["modules"]] for group in groups]
        parameter_groups = [
            {
                **{key: value for key, value in group.items() if key != "modules"},
                "params": [parameter for held in helds for parameter in held.value.parameters()],
            }
            for group, helds in zip(groups, held_groups, strict=True)
        ]
        try:
            optimizer = optimizer_class(parameter_groups, **defaults)
        except (TypeError, ValueError) as error:
            raise WrongArguments(f"{class_name}: {error}") from None
        made = WorkerOptimizer(
            uid, optimizer, [held for helds in held_groups for held in helds], self._objects
        )
        if resume:
            saved = self._objects.saved_optimizers.get(uid)
            if saved is not None:
                made.load_state_dict(saved)
        return made

    def _find(self, name: str) -> type[torch.optim.Optimizer]:
        found = getattr(torch.optim, name, None)
        if found is None:
            found = self._registry.find(name, "this worker").value
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise WrongArguments(f"{name} is no optimizer; the worker must expose it, or torch.optim have it")
        return found

    def _held(self, module: object) -> Held:
        held = self._objects.of(module)
        if held is None or not isinstance(module, torch.nn.Module):
            raise WrongArguments("an optimizer is for modules that live on this worker")
        return held


class WorkerOptimizer:
    """One trainer's optimizer on one worker.

    A step is made in two parts. `prepare` takes the locks of the modules and checks that the step can be
    made; `commit` makes it. Between the two no other trainer can step these modules, so steps are whole.
    """

    def __init__(
        self, uid: str, optimizer: torch.optim.Optimizer, modules: Sequence[Held], objects: Objects
    ) -> None:
        self.uid = uid
        self._optimizer = optimizer
        # In one order everywhere, so that two steps never wait for each other.
        self.modules = sorted({held.number: held for held in modules}.values(), key=lambda held: held.number)
        self._objects = objects
        self._lock = threading.Lock()
        self._prepared: tuple[int, dict[torch.Tensor, torch.Tensor], ExitStack] | None = None
        objects.optimizers.add(self)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    # -- called by the trainer

    def prepare(
        self,
        ticket: int,
        options: list[dict[str, Any]],
        skip_nonfinite: bool,
        allow_missing: bool,
        patience: float,
    ) -> None:
        """Checks that a step can be made, and keeps others from making one until commit or abort."""
        held = self._take_locks(patience)
        try:
            gradients = self._gradients()
            self._check(gradients, skip_nonfinite, allow_missing)
            for group, changed in zip(self._optimizer.param_groups, options, strict=True):
                group.update(changed)
        except BaseException:
            held.close()
            raise
        with self._lock:
            stale, self._prepared = self._prepared, (ticket, gradients, held)
        if stale is not None:
            stale[2].close()

    def commit(self, ticket: int) -> None:
        """Makes the step that was prepared."""
        with self._lock:
            prepared = self._prepared
            if prepared is None or prepared[0] != ticket:
                raise _refused("lost", "the step to commit was not prepared here, or given up")
            self._prepared = None
        _, gradients, held = prepared
        with held:
            self._step(gradients)

    def abort(self, ticket: int) -> None:
        """Gives up a step that was prepared, if it still is."""
        with self._lock:
            prepared = self._prepared
            if prepared is None or prepared[0] != ticket:
                return
            self._prepared = None
        prepared[2].close()

    def step(
        self, options: list[dict[str, Any]], skip_nonfinite: bool, allow_missing: bool, patience: float
    ) -> None:
        """Both parts at once, for a trainer that has no other worker to agree with."""
        ticket = -1
        self.prepare(ticket, options, skip_nonfinite, allow_missing, patience)
        self.commit(ticket)

    def zero_grad(self) -> None:
        gradwire.current_context().zero_grad(self.parameters)

    def sum_of_powers(self, norm_type: float) -> float:
        """The part of these gradients in a norm: the sum of their powers, or the largest for infinity."""
        return gradwire.optim.sum_of_powers(self._gradients().values(), norm_type)

    def scale_gradients(self, factor: float) -> None:
        gradwire.current_context().scale_gradients(self.parameters, factor)

    def state_dict(self) -> dict[str, Any]:
        with self._objects.unchanging([held.value for held in self.modules]):
            state: dict[str, Any] = _copied(self._optimizer.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._objects.unchanging([held.value for held in self.modules]):
            try:
                self._optimizer.load_state_dict(state)
            except (ValueError, KeyError) as error:
                raise WrongArguments(f"the state does not fit this optimizer: {error}") from None

    def gradwire_close(self) -> None:
        """The trainer is gone: what it had prepared is given up."""
        self._objects.optimizers.discard(self)
        with self._lock:
            prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared[2].close()

    # -- the step

    def _take_locks(self, patience: float) -> ExitStack:
        give_up_at = time.monotonic() + patience
        taken = ExitStack()
        for held in self.modules:
            if not held.step_lock.acquire(timeout=max(give_up_at - time.monotonic(), 0.0)):
                taken.close()
                raise _refused("busy", f"{type(held.value).__name__} is being stepped by another trainer")
            taken.callback(held.step_lock.release)
        return taken

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        gradients = gradwire.current_context().gradients()
        return {leaf: gradients[leaf] for leaf in self.parameters if leaf in gradients}

    def _check(
        self, gradients: dict[torch.Tensor, torch.Tensor], skip_nonfinite: bool, allow_missing: bool
    ) -> None:
        if not gradients and not allow_missing:
            raise _refused("missing", "there are no gradients for any parameter; was backward run?")
        if skip_nonfinite:
            bad = [name for name, parameter in self._named() if not _is_finite(gradients.get(parameter))]
            if bad:
                raise _refused("nonfinite", f"the gradients of {', '.join(bad[:5])} are not finite")

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        for held in self.modules:
            prefix = held.name or type(held.value).__name__
            for name, parameter in held.value.named_parameters():
                yield f"{prefix}.{name}", parameter

    def _step(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        with ExitStack() as stack:
            lenient = tuple(p for held in self.modules if held.allow_stale for p in held.value.parameters())
            if lenient:
                # A backward of an older forward may then use the new values: that is what was asked for.
                preserve: Callable[..., Any] = _unsafe_preserve_version_counter
                stack.enter_context(preserve(lenient))
            for parameter in self.parameters:
                parameter.grad = gradients.get(parameter)
            stack.callback(self._forget_grad)
            self._optimizer.step()

    def _forget_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _refused(reason: str, message: str) -> StepRefused:
    error = StepRefused(message)
    error.reason = reason
    return error


def _is_finite(gradient: torch.Tensor | None) -> bool:
    if gradient is None:
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
