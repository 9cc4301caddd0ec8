"""Optimizers over parameters here and on workers, stepped all together or not at all."""

from __future__ import annotations

import inspect
import itertools
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradwire.api.contexts import Context, current_context, is_explicit
from gradwire.errors import GradwireError, LinkError, NotFound, StepRefused, StepTorn, Unavailable
from gradwire.runtime.scope import current_scope, entered, time_left
from gradwire.system.interrupts import Uninterrupted
from gradwire.system.randomness import between
from gradwire.training.optimizer_parts import (
    Item,
    LocalPart,
    ParameterGroup,
    RemoteCall,
    RemotePart,
    Settled,
    all_of,
    as_groups,
)
from gradwire.training.stepping import MADE, NOT_MADE, UNKNOWN, sum_of_powers

__all__ = ["DistributedOptimizer"]

_PATIENCE_SECONDS = 0.2
"""How long a worker that is asked alone waits for another trainer's step before it says that it is busy."""
_SHORT_PATIENCE_SECONDS = 0.02
"""The same where all workers are asked at once: two trainers may each hold what the other waits for."""
_ABORT_SECONDS = 5.0
"""How long to try to tell a worker that a step is given up; it also learns that from the next one."""
_OUTCOME_SECONDS = 10.0
"""How long to try to learn from a worker whether it made a step whose answer was lost."""
_STEP_SECONDS = 60.0
"""How long a step is tried again while workers are busy, unless a deadline is nearer."""


class DistributedOptimizer(torch.optim.Optimizer):
    """A `torch.optim` optimizer over modules here and on workers.

    The state lives beside the parameters. `step` is made everywhere or nowhere: if one worker cannot step,
    none does, and `StepRefused` says who and why. Where a worker is lost in the middle of it, `StepTorn` says
    who has made it and of whom it is not known. Learning-rate schedulers work on it.

    `params` are modules (local ones, that may contain remote ones; remote ones), local tensors, or groups:
    ``{"params": [decoder], "lr": 1e-4}``. With `skip_nonfinite`, gradients that are not finite make a step
    fail rather than spoil the parameters. A worker without any gradients makes a step fail, too, unless
    `allow_missing`.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Item],
        *,
        skip_nonfinite: bool = False,
        allow_missing: bool = False,
        **defaults: Any,
    ) -> None:
        if _needs_closure(optimizer_class):
            raise TypeError(
                f"{optimizer_class.__name__} steps by running the model again, and again: not here"
            )
        groups = [ParameterGroup(item) for item in as_groups(params)]
        if not any(group.local or group.remote for group in groups):
            raise ValueError("there are no parameters to optimize")
        stand_in = [torch.zeros(1, 1, requires_grad=True) for _ in groups]
        template = optimizer_class(
            [{"params": [p], **group.options} for p, group in zip(stand_in, groups, strict=True)], **defaults
        )
        self._is_made = False
        self._remote: list[RemotePart] = []
        super().__init__(
            [{"params": [p], **group.options} for p, group in zip(stand_in, groups, strict=True)],
            template.defaults,
        )
        self._is_made = True
        for shown, group in zip(self.param_groups, groups, strict=True):
            shown["params"] = group.shown
        self._optimizer_class = optimizer_class
        self._constructor_defaults = defaults
        self._groups = groups
        self._skip_nonfinite = skip_nonfinite
        self._allow_missing = allow_missing
        self._stepping = threading.Lock()
        self._tickets = itertools.count(1)
        self._local = LocalPart(optimizer_class, self.param_groups, defaults, groups)
        self._remote = self._parts_for_new_workers(groups)
        all_of([part.start_make(resume=False) for part in self._remote])

    def _parts_for_new_workers(self, groups: Sequence[ParameterGroup]) -> list[RemotePart]:
        # By the worker itself: there may be several handles to it, with links of their own.
        workers = {ref.worker._link.peer.id: ref.worker for group in groups for ref in group.remote}
        for part in self._remote:
            workers.pop(part.peer, None)
        return [
            RemotePart(peer, worker, self._optimizer_class, self._constructor_defaults, groups)
            for peer, worker in workers.items()
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of modules and tensors, as they may be given to the constructor.

        The state of the others stays. If a worker cannot add its part, nothing is added anywhere.
        """
        if not self._is_made:  # the constructor of torch's own class
            super().add_param_group(param_group)
            return
        with self._stepping:
            new = ParameterGroup(param_group)
            if not new.shown:
                raise ValueError("there are no parameters to optimize in the group")
            if any(map(new.overlaps, self._groups)):
                raise ValueError("some parameters appear in more than one parameter group")
            stand_in = {"params": [torch.zeros(1, 1, requires_grad=True)], **new.options}
            self._optimizer_class(
                [stand_in], **self._constructor_defaults
            )  # raises if an option is not right
            self._local.check_new(new)
            self._add_on_workers(new)
            super().add_param_group(stand_in)
            self.param_groups[-1]["params"] = new.shown
            self._local.add(self.param_groups[-1], new)
            self._groups.append(new)

    def _add_on_workers(self, new: ParameterGroup) -> None:
        groups = [*self._groups, new]
        added = self._parts_for_new_workers(groups)
        calls = [part.start_setting_groups(groups) for part in self._remote]
        calls += [part.start_make(resume=False) for part in added]
        try:
            all_of(calls)
        except BaseException:
            with _without_deadline():
                Settled([part.start_setting_groups(self._groups) for part in self._remote if part.is_linked])
            raise
        self._remote += added

    # -- the step

    _step_supports_amp_scaling = True
    """Has a `torch.amp.GradScaler` say what it found: `found_inf`, and `grad_scale` where it is left to the
    optimizer to unscale. So a step knows of it, and can refuse what would be stepped without it."""

    def step(self, context: Context | None = None) -> None:  # type: ignore[override]
        """Steps all parameters with the gradients of plain backward, or with those of a context.

        Raises `StepRefused` if it was made nowhere, and `StepTorn` if it was, or may have been, made on some
        workers only. The parameters in this process are as they were in both cases.
        """
        if callable(context):
            raise TypeError("a closure is not supported: run backward first, then step")
        try:
            self._step(context)
        except BaseException:
            # A scaler takes these back after a step that worked only. Left here, they would count once more.
            vars(self).pop("grad_scale", None)
            vars(self).pop("found_inf", None)
            raise

    def _step(self, context: Context | None) -> None:
        is_scaled = "found_inf" in vars(self)
        if is_scaled and context is not None:
            raise TypeError(
                "a GradScaler works on the gradients of plain backward(), and not on those of a context: use "
                "scaler.scale(loss).backward() and scaler.step(optimizer)"
            )
        if is_scaled and bool(vars(self)["found_inf"]):
            return  # no parameter is stepped, here or on any worker
        scale: torch.Tensor | None = vars(self).get("grad_scale")
        inverse_scale = None if scale is None else float(scale.double().reciprocal().float())
        with self._stepping, _in_context(context):
            local = self._local.gradients(context)
            if inverse_scale is not None:
                local = self._local.unscaled(local, inverse_scale)
            self._local.check(local, self._skip_nonfinite)
            left = time_left(None)
            give_up_at = time.monotonic() + (_STEP_SECONDS if left is None else left)
            for attempt in itertools.count():
                try:
                    # No key may leave it made on some workers, or not here. All waits in it have an end.
                    with Uninterrupted():
                        self._step_remote(inverse_scale, in_turn=attempt > 0)
                        self._local.step(local)
                    return
                except StepRefused as refused:
                    if refused.reason != "busy" or time.monotonic() >= give_up_at:
                        raise
                    # Another trainer steps; come back apart from whoever else waits for the same.
                    time.sleep(between(0, min(0.001 * 2**attempt, 0.1)))

    def _step_remote(self, inverse_scale: float | None, *, in_turn: bool) -> None:
        if len(self._remote) == 1 and time_left(None) is None:
            self._step_one(next(self._tickets), self._remote[0], inverse_scale)
        elif self._remote:
            self._prepare_and_commit(next(self._tickets), inverse_scale, in_turn=in_turn)

    def _step_one(self, ticket: int, part: RemotePart, inverse_scale: float | None) -> None:
        """One request. Once it is sent it counts."""
        call = part.start("step", ticket, *self._checks(), inverse_scale, _PATIENCE_SECONDS, True)
        self._conclude(ticket, [part], [call], Settled([call]))

    def _prepare_and_commit(self, ticket: int, inverse_scale: float | None, *, in_turn: bool) -> None:
        """Asks all workers whether they can step, then tells them to.

        At first all at once. If another trainer was in the way, one after the other, in the order that all
        trainers keep to: so they wait for one another, but never in a circle. Each worker then lets them step
        in the order in which they came, and keeps the place of one that comes again.
        """
        parts = sorted(self._remote, key=lambda part: part.peer) if in_turn else self._remote
        groups = [[part] for part in parts] if in_turn else [parts]
        patience = _PATIENCE_SECONDS if in_turn else _SHORT_PATIENCE_SECONDS
        asked: list[RemotePart] = []
        try:
            for group in groups:
                asked += group
                settled = Settled(
                    [
                        part.start("prepare", ticket, *self._checks(), inverse_scale, patience, in_turn)
                        for part in group
                    ]
                )
                if settled.failed:
                    raise _who_and_why([(group[index], error) for index, error in settled.failed])
        except BaseException:
            self._abort(ticket, asked)
            raise
        self._commit(ticket)

    def _abort(self, ticket: int, parts: Sequence[RemotePart]) -> None:
        with _without_deadline():
            calls = [part.start("abort", ticket, timeout=_ABORT_SECONDS) for part in parts if part.is_linked]
            Settled(calls)

    def _commit(self, ticket: int) -> None:
        # All have agreed: from here on no deadline may leave some stepped and some not.
        with _without_deadline():
            calls = [part.start("commit", ticket) for part in self._remote]
            self._conclude(ticket, self._remote, calls, Settled(calls))

    def _conclude(
        self, ticket: int, parts: Sequence[RemotePart], calls: Sequence[RemoteCall], settled: Settled
    ) -> None:
        """Returns if all workers made the step. Else it finds out who did, and raises what says so.

        Where they had agreed, it takes a death or a broken optimizer between the yes and the answer.
        """
        if not settled.failed:
            return
        asked = Settled(
            [
                partial(_outcome, parts[index], ticket, error, was_sent=calls[index].was_sent)
                for index, error in settled.failed
            ]
        )
        outcomes = dict.fromkeys(settled.worked, MADE)
        outcomes.update(zip((index for index, _ in settled.failed), asked.results, strict=True))
        failures = [(parts[index], error) for index, error in settled.failed if outcomes[index] != MADE]
        if not failures:
            return
        # Whoever was not reached and is still there must not wait for it.
        self._abort(ticket, [part for part, _ in failures])
        if all(outcome == NOT_MADE for outcome in outcomes.values()):
            raise _who_and_why(failures)
        raise _torn([(parts[index].worker.target, outcome) for index, outcome in outcomes.items()], failures)

    def _checks(self) -> tuple[list[dict[str, Any]], bool, bool]:
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return options, self._skip_nonfinite, self._allow_missing

    # -- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, here and on all workers: those of plain backward, and those of the context
        that was entered, if any."""
        calls = [part.start("zero_grad") for part in self._remote]
        current = current_context()
        if is_explicit(current.id):
            current.zero_grad(self._local.parameters)
        if self._local.optimizer is not None:
            self._local.optimizer.zero_grad(set_to_none)
        all_of(calls)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        context: Context | None = None,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scales all gradients, here and on workers, so that their common norm is at most `max_norm`.

        Returns the norm that they had together: one norm over all parameters, as if all were here.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be more than 0, not {norm_type}")
        with _in_context(context):
            calls = [part.start("sum_of_powers", norm_type) for part in self._remote]
            local = self._local.gradients(context)
            parts = [sum_of_powers(local.values(), norm_type), *all_of(calls)]
            # A NaN must not get lost, as it may in Python's max.
            total = sum(parts) if math.isnan(sum(parts)) or math.isfinite(norm_type) else max(parts)
            norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
            if error_if_nonfinite and not math.isfinite(norm):
                raise RuntimeError(f"the norm of the gradients is {norm}, so they cannot be clipped")
            factor = max_norm / (norm + 1e-6)
            if not factor >= 1.0:
                calls = [part.start("scale_gradients", factor) for part in self._remote]
                self._local.scale(local, factor, context)
                all_of(calls)
        return torch.tensor(norm, dtype=torch.float64)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts, brought here."""
        calls = [part.start("state_dict") for part in self._remote]
        return {
            "param_groups": [
                {k: v for k, v in group.items() if k != "params"} for group in self.param_groups
            ],
            "local": self._local.optimizer.state_dict() if self._local.optimizer else None,
            "remote": all_of(calls),
        }

    def state_parts(self) -> Iterator[tuple[str, Any]]:
        """What `state_dict` has, with the workers' parts as an iterator that fetches one at a time."""
        yield "param_groups", [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        yield "local", self._local.optimizer.state_dict() if self._local.optimizer else None
        yield "remote", (part.start("state_dict")() for part in self._remote)

    def group_sizes(self) -> tuple[list[int] | None, list[tuple[str, list[int]]]]:
        """How many tensors each group has: here, and on each worker."""
        calls = [part.start("group_sizes") for part in self._remote]
        local = self._local.optimizer
        here = None if local is None else [len(group["params"]) for group in local.param_groups]
        return here, [(p.worker.target, s) for p, s in zip(self._remote, all_of(calls), strict=True)]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Sends a state to all parts."""
        if len(state_dict["remote"]) != len(self._remote) or len(state_dict["param_groups"]) != len(
            self.param_groups
        ):
            raise ValueError("the state is of an optimizer over other workers or groups")
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        if self._local.optimizer is not None:
            self._local.optimizer.load_state_dict(state_dict["local"])
        all_of(
            [
                part.start("load_state_dict", saved)
                for part, saved in zip(self._remote, state_dict["remote"], strict=True)
            ]
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer with parts on workers cannot be copied or pickled; use its state_dict")

    def __repr__(self) -> str:
        places = [f"{len(part.modules)} modules on {part.worker.target}" for part in self._remote]
        local = len(self._local.parameters)
        return f"DistributedOptimizer({local} tensors here, {', '.join(places) or 'none on workers'})"


def _outcome(part: RemotePart, ticket: int, error: GradwireError, *, was_sent: bool) -> str:
    """What became of a step whose request failed."""
    if not was_sent or isinstance(error, StepRefused | NotFound | Unavailable):
        return NOT_MADE
    try:
        return part.outcome(ticket, _OUTCOME_SECONDS)
    except GradwireError:
        return UNKNOWN


def _torn(
    outcomes: Sequence[tuple[str, str]], failures: Sequence[tuple[RemotePart, GradwireError]]
) -> StepTorn:
    """The error for a step that some workers made, or may have made, and others not."""
    part, cause = failures[0]
    torn = StepTorn(worker=part.worker.target)
    torn.made = tuple(target for target, outcome in outcomes if outcome == MADE)
    torn.unknown = tuple(target for target, outcome in outcomes if outcome == UNKNOWN)
    torn.failed = tuple(target for target, outcome in outcomes if outcome not in (MADE, UNKNOWN))
    places = (("made on", torn.made), ("maybe made on", torn.unknown), ("not made on", torn.failed))
    where = ", ".join(f"{how} {' and '.join(targets)}" for how, targets in places if targets)
    said = "; ".join(f"{part.worker.target}: {error}" for part, error in failures)
    torn.message = f"the step was {where}; go on from a checkpoint ({said})"
    torn.__cause__ = cause
    return torn


def _who_and_why(failures: Sequence[tuple[RemotePart, GradwireError]]) -> StepRefused:
    """One error for all that kept a step from being made."""
    reasons = [_reason(error) for _, error in failures]
    # A reason that does not pass by itself outweighs "busy".
    first = next((index for index, reason in enumerate(reasons) if reason != "busy"), 0)
    said = "; ".join(f"{part.worker.target}: {error}" for part, error in failures)
    refused = StepRefused(f"the step was not made: {said}", worker=failures[first][0].worker.target)
    refused.reason = reasons[first]
    refused.__cause__ = failures[first][1]
    return refused


def _reason(error: GradwireError) -> str:
    if isinstance(error, StepRefused):
        return error.reason
    return "lost" if isinstance(error, LinkError) else "error"


def _in_context(context: Context | None) -> AbstractContextManager[None]:
    return nullcontext() if context is None else entered(replace(current_scope(), context=context.id))


def _without_deadline() -> AbstractContextManager[None]:
    return entered(replace(current_scope(), deadline=None))


def _needs_closure(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
