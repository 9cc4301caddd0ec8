"""Optimizers on the worker that has the parameters: a step is prepared, then committed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

import gradwire
from gradwire.autograd import borrowed_grad
from gradwire.errors import GradwireError, StepRefused, StepTorn, WrongArguments
from gradwire.training.stepping import (
    DryRun,
    StepOutcome,
    StepRequest,
    failed_step,
    sum_of_powers,
    unscaled,
)
from gradwire_server.objects.registry import Registry
from gradwire_server.objects.store import ObjectStore
from gradwire_server.objects.stored import StoredObject, parameter_sets_of

__all__ = ["OptimizerFactory", "WorkerOptimizer"]


class OptimizerFactory:
    """Creates the optimizers of one worker."""

    def __init__(self, registry: Registry, objects: ObjectStore) -> None:
        self._registry = registry
        self._objects = objects

    def create(
        self, uid: str, class_name: str, defaults: dict[str, Any], groups: list[dict[str, Any]], resume: bool
    ) -> WorkerOptimizer:
        """An optimizer over the parameters of modules.

        Each group has its modules under "modules", and options of its own beside them. With `resume` the
        optimizer goes on from the last state that this worker knows of the optimizer `uid`, if its modules
        have names.
        """
        optimizer_class = self._find_class(class_name)
        try:
            optimizer = optimizer_class([_parameter_group(group) for group in groups], **defaults)
        except (TypeError, ValueError) as error:
            raise WrongArguments(f"{class_name}: {error}") from None
        created = WorkerOptimizer(uid, optimizer, _stored_modules(groups, self._objects), self._objects)
        if resume:
            created.knows_all_steps = False
            self._resume(created)
        return created

    def _resume(self, created: WorkerOptimizer) -> None:
        """Goes on from the predecessor that is still here, if just the link was lost, or from restored
        state."""
        predecessors = [
            optimizer
            for optimizer in self._objects.live_optimizers()
            if optimizer is not created and optimizer.uid == created.uid
        ]
        if predecessors:
            predecessor = predecessors[0]
            predecessor.gradwire_close()
            # This waits for a step that the predecessor is making. It makes no other from here on.
            created.resume_from(predecessor.state_dict())
            created.take_over_steps(predecessor)
            return
        restored = self._objects.restored_optimizer_states.get(created.uid)
        if restored is not None:
            # A copy, because the state directory may be saving the restored state at this moment.
            created.resume_from(_copied(restored))
            # From now on the state directory saves the state of the optimizer itself.
            self._objects.restored_optimizer_states.pop(created.uid, None)

    def _find_class(self, name: str) -> type[torch.optim.Optimizer]:
        # The prefix tells torch's own classes from an exposed class that has the same name.
        torch_name = name.removeprefix("torch.optim.")
        if torch_name != name:
            found = getattr(torch.optim, torch_name, None)
        else:
            found = self._registry.exposed_class(name)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise WrongArguments(f"{name} is no optimizer here; the worker must expose it, or torch have it")
        return found


class _PreparedStep(NamedTuple):
    ticket: int
    gradients: dict[torch.Tensor, torch.Tensor]
    reservation: ExitStack


class WorkerOptimizer:
    """One trainer's optimizer on one worker.

    A step has two phases. `prepare` reserves the modules and checks that the step can be made; `commit` makes
    the step, while nothing computes with the modules. Between the two no other trainer can step these
    modules, so no worker sees a part of another trainer's step.

    The trainer numbers its steps. A number is called a ticket, and each is larger than those before it.
    """

    def __init__(
        self,
        uid: str,
        optimizer: torch.optim.Optimizer,
        modules: Sequence[StoredObject],
        objects: ObjectStore,
    ) -> None:
        self.uid = uid
        self.changes = 0
        """How often the optimizer's state changed."""
        self._optimizer = optimizer
        self._objects = objects
        self._set_modules(modules)
        self._dry_run = DryRun(optimizer)
        self._lock = threading.Lock()
        self._prepared: _PreparedStep | None = None
        self._aborted_up_to = 0.0
        """The last ticket that was aborted. A prepare with such a ticket came late, and must not keep its
        reservation."""
        self._commit_begun = 0
        """The ticket of the last step whose commit has begun. Whether the step was made is known when its
        reservation ends."""
        self._half_made = 0
        """The ticket of a step that failed in the middle."""
        self._latest_ticket = 0
        """The last ticket that a step was requested with."""
        self.knows_all_steps = True
        """Whether the trainer made no steps before this optimizer was created."""
        objects.optimizers.add(self)

    def _set_modules(self, modules: Sequence[StoredObject]) -> None:
        unique = {stored.number: stored for stored in modules}
        self.modules = sorted(unique.values(), key=lambda stored: stored.number)
        self._parameter_sets = parameter_sets_of(self.modules)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def is_prepared(self) -> bool:
        """Whether a step waits for its commit."""
        return self._prepared is not None

    # -- called by the trainer

    def prepare(self, ticket: int, request: StepRequest) -> None:
        """Checks that a step can be made, and keeps other trainers from stepping until commit or abort.

        Raises StepRefused if the step cannot be made, or if another trainer has reserved the modules for
        longer than the `patience` of the request.
        """
        with self._lock:
            self._latest_ticket = max(self._latest_ticket, ticket)
        # Whatever became of the steps before, their trainer has gone on.
        self.abort(ticket - 1)
        reservation = self._objects.parameters.access.reserve(
            self._parameter_sets,
            time.monotonic() + request["patience"],
            self.uid if request["keep_place"] else None,
        )
        if reservation is None:
            labels = ", ".join(stored.label for stored in self.modules[:5])
            raise _refused("busy", f"{labels}: another trainer is about to step")
        with reservation:
            gradients = self._gradients()
            if request["inverse_scale"] is not None:
                gradients = _all_unscaled(gradients, request["inverse_scale"])
            for group, options in zip(self._optimizer.param_groups, request["options"], strict=True):
                group.update(options)
            self._check(gradients, request["skip_nonfinite"], request["allow_missing"])
            with self._lock:
                if ticket <= self._aborted_up_to:
                    raise _refused("lost", "the step was given up before it was prepared")
                # From here on `commit` or `abort` ends the reservation.
                self._prepared = _PreparedStep(ticket, gradients, reservation.pop_all())

    def commit(self, ticket: int) -> None:
        """Makes the step that was prepared. A second commit of the same step does nothing."""
        with self._lock:
            if ticket == self._half_made:
                raise StepTorn("the optimizer failed in the middle of this step")
            if ticket == self._commit_begun:
                return
            prepared = self._begin_commit(ticket)
        self._make_step(prepared)

    def abort(self, ticket: float) -> None:
        """Gives up all steps up to this ticket: what was prepared, and a prepare that arrives late."""
        with self._lock:
            self._aborted_up_to = max(self._aborted_up_to, ticket)
            prepared = self._prepared
            if prepared is None or prepared.ticket > ticket:
                return
            self._prepared = None
        prepared.reservation.close()

    def step(self, ticket: int, request: StepRequest) -> None:
        """Both phases in one request, for a trainer whose modules are all on this worker."""
        self.prepare(ticket, request)
        with self._lock:
            prepared = self._begin_commit(ticket)
        self._make_step(prepared)

    def outcome(self, ticket: int) -> str:
        """What became of a step whose response was lost. A step that was not made will never be made."""
        self.abort(ticket)
        # The reservation waits for a step that is being made.
        with self._objects.parameters.reserved(self.modules), self._lock:
            if ticket == self._half_made:
                return StepOutcome.HALF_MADE
            if ticket == self._commit_begun:
                return StepOutcome.MADE
            is_known = self.knows_all_steps or ticket <= self._latest_ticket
            return StepOutcome.NOT_MADE if is_known else StepOutcome.UNKNOWN

    def take_over_steps(self, predecessor: WorkerOptimizer) -> None:
        """Knows the outcome of the steps of a predecessor, which makes none any more."""
        self._commit_begun, self._half_made = predecessor._commit_begun, predecessor._half_made
        self._latest_ticket = self._aborted_up_to = predecessor._latest_ticket
        self.knows_all_steps = predecessor.knows_all_steps

    def zero_grad(self) -> None:
        gradwire.current_context().zero_grad(self.parameters)

    def sum_of_powers(self, norm_type: float) -> float:
        """What these gradients add to a norm: the sum of their powers, or the largest for infinity."""
        return sum_of_powers(self._gradients().values(), norm_type)

    def scale_gradients(self, factor: float) -> None:
        gradwire.current_context().scale_gradients(self.parameters, factor)

    def state_dict(self) -> dict[str, Any]:
        with self._objects.parameters.reserved(self.modules):
            return self.copied_state()

    def copied_state(self) -> dict[str, Any]:
        """`state_dict` for a caller that has reserved the modules already."""
        state: dict[str, Any] = _copied(self._optimizer.state_dict())
        return state

    def group_sizes(self) -> list[int]:
        """How many parameters each group has."""
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def set_groups(self, groups: list[dict[str, Any]]) -> None:
        """Appends further parameter groups, or removes the last groups, so that exactly `groups` are left.

        The state of the parameters that stay is kept. A second request for the same groups does nothing.
        """
        modules = _stored_modules(groups, self._objects)
        with self._objects.parameters.reserved(self.modules):
            present = self._optimizer.param_groups
            try:
                for group in groups[len(present) :]:
                    self._optimizer.add_param_group(_parameter_group(group))
            except (TypeError, ValueError) as error:
                raise WrongArguments(str(error)) from None
            for group in present[len(groups) :]:
                for parameter in group["params"]:
                    self._optimizer.state.pop(parameter, None)
            del present[len(groups) :]
            self._set_modules(modules)
            self.changes += 1

    def resume_from(self, state: dict[str, Any]) -> None:
        """Loads the state of a predecessor, which may not have had the last of the present groups yet."""
        present = self._optimizer.state_dict()["param_groups"]
        saved = state["param_groups"]
        self.load_state_dict({**state, "param_groups": [*saved, *present[len(saved) :]]})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._objects.parameters.reserved(self.modules):
            try:
                self._optimizer.load_state_dict(state)
            except (ValueError, KeyError) as error:
                raise WrongArguments(f"the state does not fit this optimizer: {error}") from None
            self.changes += 1

    def gradwire_close(self) -> None:
        """Called when the trainer is gone: gives up the step that it had prepared."""
        self._objects.optimizers.discard(self)
        self.abort(math.inf)

    # -- the step

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        gradients = gradwire.current_context().peek()
        return {leaf: gradients[leaf] for leaf in self.parameters if leaf in gradients}

    def _check(
        self, gradients: dict[torch.Tensor, torch.Tensor], skip_nonfinite: bool, allow_missing: bool
    ) -> None:
        # Where all parameters are frozen, no gradient is missing.
        is_trained = any(parameter.requires_grad for parameter in self.parameters)
        if not gradients and is_trained and not allow_missing:
            raise _refused("missing", "there are no gradients for any parameter; was backward run?")
        if skip_nonfinite:
            names = {parameter: name for name, parameter in self._named_parameters()}
            bad = [names[parameter] for parameter, gradient in gradients.items() if not _is_finite(gradient)]
            if bad:
                raise _refused("nonfinite", f"the gradients of {', '.join(bad[:5])} are not finite")
        refusal = self._dry_run.refusal(gradients)
        if refusal is not None:
            raise _refused("error", refusal)

    def _begin_commit(self, ticket: int) -> _PreparedStep:
        """The step that is about to be made. The caller holds the lock."""
        prepared = self._prepared
        if prepared is None or prepared.ticket != ticket:
            raise _refused("lost", "the step to commit was not prepared here, or given up")
        self._prepared = None
        self._commit_begun = ticket
        return prepared

    def _named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        for stored in self.modules:
            for name, parameter in stored.value.named_parameters():
                yield f"{stored.label}.{name}", parameter

    def _make_step(self, prepared: _PreparedStep) -> None:
        # In this order: a hook that has borrowed `.grad` may compute with the parameters.
        written = self._objects.parameters.written(self.modules)
        with prepared.reservation, borrowed_grad(self.parameters), written:
            for parameter, gradient in prepared.gradients.items():
                parameter.grad = gradient
            try:
                self._optimizer.step()
            except BaseException as error:
                self._half_made = prepared.ticket
                if isinstance(error, GradwireError):
                    raise failed_step(error) from error
                raise
            self.changes += 1


def _stored_modules(groups: Sequence[dict[str, Any]], objects: ObjectStore) -> list[StoredObject]:
    """The modules of parameter groups, as they are stored here."""
    found = []
    for module in (module for group in groups for module in group["modules"]):
        stored = objects.find(module)
        if stored is None or not isinstance(module, torch.nn.Module):
            raise WrongArguments("an optimizer is for modules that live on this worker")
        found.append(stored)
    return found


def _parameter_group(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group in torch's form."""
    options = {key: value for key, value in group.items() if key != "modules"}
    # Each parameter once: the same module may be in a group twice, and modules may share parameters.
    parameters = dict.fromkeys(p for module in group["modules"] for p in module.parameters())
    return {**options, "params": list(parameters)}


def _refused(reason: str, message: str) -> StepRefused:
    error = StepRefused(message)
    error.reason = reason
    return error


def _all_unscaled(
    gradients: dict[torch.Tensor, torch.Tensor], inverse_scale: float
) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients without the factor of a GradScaler. Copies, because the step may yet be refused."""
    try:
        results = {parameter: unscaled(gradient, inverse_scale) for parameter, gradient in gradients.items()}
    except ValueError as error:
        raise _refused("error", str(error)) from None
    return {parameter: result for parameter, (result, _) in results.items()}


def _is_finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())


def _copied(value: Any) -> Any:
    """A copy of a state, down to its tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
