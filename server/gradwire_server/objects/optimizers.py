"""Optimizers beside the parameters that they step: prepare, then commit, one step at a time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

import gradwire
from gradwire.autograd import borrowed_grad
from gradwire.errors import StepRefused, WrongArguments
from gradwire.training.stepping import DryRun, StepOutcome, sum_of_powers, unscaled
from gradwire_server.objects.registry import Registry
from gradwire_server.objects.store import HeldObject, ObjectStore

__all__ = ["Optimizers", "WorkerOptimizer"]


class Optimizers:
    """Makes the optimizers of one worker."""

    def __init__(self, registry: Registry, objects: ObjectStore) -> None:
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
        try:
            optimizer = optimizer_class([_parameter_group(group) for group in groups], **defaults)
        except (TypeError, ValueError) as error:
            raise WrongArguments(f"{class_name}: {error}") from None
        made = WorkerOptimizer(uid, optimizer, _held_in(groups, self._objects), self._objects)
        if resume:
            made.is_first = False
            self._resume(made)
        return made

    def _resume(self, made: WorkerOptimizer) -> None:
        """Goes on from the one that is still here, if just the link was lost, or from what was restored."""
        others = [one for one in self._objects.live_optimizers() if one is not made]
        before = next((one for one in others if one.uid == made.uid), None)
        if before is not None:
            before.gradwire_close()
            # This waits for a step that is being made; no other is made there any more.
            made.go_on_from(before.state_dict())
            made.remember_steps_of(before)
            return
        saved = self._objects.saved_optimizers.get(made.uid)
        if saved is not None:
            # A copy: this one may be about to be saved again.
            made.go_on_from(_copied(saved))
            # From now on the state of the optimizer itself is what is saved.
            self._objects.saved_optimizers.pop(made.uid, None)

    def _find(self, name: str) -> type[torch.optim.Optimizer]:
        # The prefix tells torch's own from one of the user's that has the same name.
        own = name.removeprefix("torch.optim.")
        if own != name:
            found = getattr(torch.optim, own, None)
        else:
            found = self._registry.served_class(name)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise WrongArguments(f"{name} is no optimizer here; the worker must expose it, or torch have it")
        return found


class WorkerOptimizer:
    """One trainer's optimizer on one worker.

    A step is made in two parts. `prepare` takes the turn to change the modules and checks that the step can
    be made; `commit` makes it, while nobody computes with them. Between the two no other trainer can step
    these modules, so steps are whole.
    """

    def __init__(
        self, uid: str, optimizer: torch.optim.Optimizer, modules: Sequence[HeldObject], objects: ObjectStore
    ) -> None:
        self.uid = uid
        self.changes = 0
        """How often its state changed."""
        self._optimizer = optimizer
        self._objects = objects
        self._set_modules(modules)
        self._dry_run = DryRun(optimizer)
        self._lock = threading.Lock()
        self._prepared: tuple[int, dict[torch.Tensor, torch.Tensor], ExitStack] | None = None
        self._given_up = 0.0
        """The last ticket that was given up. Asked to prepare it late, must not keep the turn for it."""
        self._committed = 0
        self._half_made = 0
        self._arrived = 0
        """The last ticket that a step was asked for with."""
        self.is_first = True
        """Whether it knows of all steps of its trainer: there was none before it."""
        objects.optimizers.add(self)

    def _set_modules(self, modules: Sequence[HeldObject]) -> None:
        self.modules = sorted({held.number: held for held in modules}.values(), key=lambda held: held.number)
        self._locks = frozenset(lock for held in self.modules for lock in held.locks)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def is_prepared(self) -> bool:
        """Whether a step waits for its commit."""
        return self._prepared is not None

    # -- called by the trainer

    def prepare(
        self,
        ticket: int,
        options: list[dict[str, Any]],
        skip_nonfinite: bool,
        allow_missing: bool,
        inverse_scale: float | None,
        patience: float,
        keep_place: bool,
    ) -> None:
        """Checks that a step can be made, and keeps others from making one until commit or abort."""
        self._arrive(ticket)
        gradients, held = self._agree(
            options, skip_nonfinite, allow_missing, inverse_scale, patience, keep_place
        )
        with self._lock:
            if ticket > self._given_up:
                self._prepared = (ticket, gradients, held)
                return
        held.close()
        raise _refused("lost", "the step was given up before it was prepared")

    def commit(self, ticket: int) -> None:
        """Makes the step that was prepared. Asked again for the same, it does nothing."""
        with self._lock:
            if ticket == self._committed:
                return
            prepared = self._prepared
            if prepared is None or prepared[0] != ticket:
                raise _refused("lost", "the step to commit was not prepared here, or given up")
            self._prepared = None
            self._committed = ticket
        _, gradients, held = prepared
        with held:
            self._step(ticket, gradients)

    def abort(self, ticket: float) -> None:
        """Gives up what was prepared up to this ticket, now or when it arrives late."""
        with self._lock:
            self._given_up = max(self._given_up, ticket)
            prepared = self._prepared
            if prepared is None or prepared[0] > ticket:
                return
            self._prepared = None
        prepared[2].close()

    def step(
        self,
        ticket: int,
        options: list[dict[str, Any]],
        skip_nonfinite: bool,
        allow_missing: bool,
        inverse_scale: float | None,
        patience: float,
        keep_place: bool,
    ) -> None:
        """Both parts at once, for a trainer that has no other worker to agree with."""
        self._arrive(ticket)
        gradients, held = self._agree(
            options, skip_nonfinite, allow_missing, inverse_scale, patience, keep_place
        )
        with held:
            with self._lock:
                if ticket <= self._given_up:
                    raise _refused("lost", "the step was given up before it was made")
                self._committed = ticket
            self._step(ticket, gradients)

    def outcome(self, ticket: int) -> str:
        """What became of a step, for a trainer that got no answer. If it was not made, it never will be."""
        self.abort(ticket)
        # Not while it is being made.
        with self._objects.unchanging([held.value for held in self.modules]), self._lock:
            if ticket == self._half_made:
                return StepOutcome.HALF_MADE
            if ticket == self._committed:
                return StepOutcome.MADE
            return StepOutcome.NOT_MADE if self.is_first or ticket <= self._arrived else StepOutcome.UNKNOWN

    def remember_steps_of(self, before: WorkerOptimizer) -> None:
        """Takes the place of another one, which makes no steps any more."""
        self._committed, self._half_made = before._committed, before._half_made
        self._given_up, self._arrived = before._arrived, before._arrived
        self.is_first = before.is_first

    def _arrive(self, ticket: int) -> None:
        with self._lock:
            self._arrived = max(self._arrived, ticket)
        # Whatever came of an earlier one, its trainer has gone on.
        self.abort(ticket - 1)

    def zero_grad(self) -> None:
        gradwire.current_context().zero_grad(self.parameters)

    def sum_of_powers(self, norm_type: float) -> float:
        """The part of these gradients in a norm: the sum of their powers, or the largest for infinity."""
        return sum_of_powers(self._gradients().values(), norm_type)

    def scale_gradients(self, factor: float) -> None:
        gradwire.current_context().scale_gradients(self.parameters, factor)

    def state_dict(self) -> dict[str, Any]:
        with self._objects.unchanging([held.value for held in self.modules]):
            return self.copied_state()

    def copied_state(self) -> dict[str, Any]:
        """The same for somebody who has the turn to change the modules already."""
        state: dict[str, Any] = _copied(self._optimizer.state_dict())
        return state

    def group_sizes(self) -> list[int]:
        """How many parameters each group has."""
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def set_groups(self, groups: list[dict[str, Any]]) -> None:
        """Has these groups from now on, which are those that it has, and more, or without the last of them.

        The state of the parameters that stay is kept. Asked again for the same, it does nothing.
        """
        modules = _held_in(groups, self._objects)
        with self._objects.unchanging([held.value for held in self.modules]):
            own = self._optimizer.param_groups
            try:
                for group in groups[len(own) :]:
                    self._optimizer.add_param_group(_parameter_group(group))
            except (TypeError, ValueError) as error:
                raise WrongArguments(str(error)) from None
            for group in own[len(groups) :]:
                for parameter in group["params"]:
                    self._optimizer.state.pop(parameter, None)
            del own[len(groups) :]
            self._set_modules(modules)
            self.changes += 1

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Takes the state of an earlier one, which may have been there before the last groups were."""
        own = self._optimizer.state_dict()["param_groups"]
        saved = state["param_groups"]
        self.load_state_dict({**state, "param_groups": [*saved, *own[len(saved) :]]})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._objects.unchanging([held.value for held in self.modules]):
            try:
                self._optimizer.load_state_dict(state)
            except (ValueError, KeyError) as error:
                raise WrongArguments(f"the state does not fit this optimizer: {error}") from None
            self.changes += 1

    def gradwire_close(self) -> None:
        """The trainer is gone: what it had prepared is given up."""
        self._objects.optimizers.discard(self)
        self.abort(math.inf)

    # -- the step

    def _agree(
        self,
        options: list[dict[str, Any]],
        skip_nonfinite: bool,
        allow_missing: bool,
        inverse_scale: float | None,
        patience: float,
        keep_place: bool,
    ) -> tuple[dict[torch.Tensor, torch.Tensor], ExitStack]:
        """The gradients to step with, and the turn; raises StepRefused if the step cannot be made.

        With `keep_place`, a trainer whose turn does not come in time has its place when it asks again.
        """
        who = self.uid if keep_place else None
        turn = self._objects.access.turn(self._locks, time.monotonic() + patience, who)
        if turn is None:
            names = ", ".join(held.name or type(held.value).__name__ for held in self.modules[:5])
            raise _refused("busy", f"{names}: another trainer is about to step")
        try:
            gradients = self._gradients()
            if inverse_scale is not None:
                gradients = _all_unscaled(gradients, inverse_scale)
            for group, changed in zip(self._optimizer.param_groups, options, strict=True):
                group.update(changed)
            self._check(gradients, skip_nonfinite, allow_missing)
        except BaseException:
            turn.close()
            raise
        return gradients, turn

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        gradients = gradwire.current_context().peek()
        return {leaf: gradients[leaf] for leaf in self.parameters if leaf in gradients}

    def _check(
        self, gradients: dict[torch.Tensor, torch.Tensor], skip_nonfinite: bool, allow_missing: bool
    ) -> None:
        # Where all parameters are frozen, none is missing.
        is_trained = any(parameter.requires_grad for parameter in self.parameters)
        if not gradients and is_trained and not allow_missing:
            raise _refused("missing", "there are no gradients for any parameter; was backward run?")
        if skip_nonfinite:
            names = {parameter: name for name, parameter in self._named()}
            bad = [names[parameter] for parameter, gradient in gradients.items() if not _is_finite(gradient)]
            if bad:
                raise _refused("nonfinite", f"the gradients of {', '.join(bad[:5])} are not finite")
        refusal = self._dry_run.refusal(gradients)
        if refusal is not None:
            raise _refused("error", refusal)

    def _named(self) -> Iterable[tuple[str, torch.Tensor]]:
        for held in self.modules:
            prefix = held.name or type(held.value).__name__
            for name, parameter in held.value.named_parameters():
                yield f"{prefix}.{name}", parameter

    def _step(self, ticket: int, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        # In this order: a hook that has borrowed `.grad` may compute with the parameters.
        with borrowed_grad(self.parameters), self._objects.being_changed(self.modules):
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            try:
                self._optimizer.step()
            except BaseException:
                self._half_made = ticket
                raise
        self.changes += 1


def _held_in(groups: Sequence[dict[str, Any]], objects: ObjectStore) -> list[HeldObject]:
    """The modules of groups, as they are kept here."""
    found = []
    for module in (module for group in groups for module in group["modules"]):
        held = objects.of(module)
        if held is None or not isinstance(module, torch.nn.Module):
            raise WrongArguments("an optimizer is for modules that live on this worker")
        found.append(held)
    return found


def _parameter_group(group: dict[str, Any]) -> dict[str, Any]:
    """A group as torch takes it."""
    options = {key: value for key, value in group.items() if key != "modules"}
    # Once each: the same module may be in a group twice, and modules may share parameters.
    parameters = dict.fromkeys(p for module in group["modules"] for p in module.parameters())
    return {**options, "params": list(parameters)}


def _refused(reason: str, message: str) -> StepRefused:
    error = StepRefused(message)
    error.reason = reason
    return error


def _all_unscaled(
    gradients: dict[torch.Tensor, torch.Tensor], inverse_scale: float
) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients without the factor of a GradScaler. Those that are kept stay: the step may be refused."""
    try:
        results = {parameter: unscaled(gradient, inverse_scale) for parameter, gradient in gradients.items()}
    except ValueError as error:
        raise _refused("error", str(error)) from None
    return {parameter: result for parameter, (result, _) in results.items()}


def _is_finite(gradient: torch.Tensor) -> bool:
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
