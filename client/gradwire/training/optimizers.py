"""Optimizers over parameters here and on workers, which users step like any optimizer of torch."""

from __future__ import annotations

import inspect
import itertools
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gradwire.api.contexts import Context, current_context, is_explicit
from gradwire.api.workers import link_of
from gradwire.errors import StepRefused
from gradwire.runtime.scope import current_scope, deadline, entered
from gradwire.system.interrupts import Uninterrupted
from gradwire.system.randomness import between
from gradwire.training.distributed_step import DistributedStep, without_deadline
from gradwire.training.optimizer_parts import (
    CompletedCalls,
    LocalOptimizer,
    ParameterGroup,
    ParamsEntry,
    RemoteOptimizer,
    as_groups,
    wait_for_all,
)
from gradwire.training.stepping import StepSettings, sum_of_powers

__all__ = ["DistributedOptimizer"]

_STEP_SECONDS = 60.0
"""How long a step is repeated while workers are busy, unless a deadline is nearer."""


class DistributedOptimizer(torch.optim.Optimizer):
    """A `torch.optim` optimizer over modules here and on workers.

    The state of the optimizer lives beside the parameters. A step is made everywhere or nowhere: if one
    worker cannot step, no worker does, and `StepRefused` names the worker and the reason. If a worker is lost
    in the middle of a step, `StepTorn` names the workers that made the step and those of which it is not
    known. Learning-rate schedulers work as with any optimizer.

    `params` are modules, local tensors, or groups such as ``{"params": [decoder], "lr": 1e-4}``. A module may
    be remote, or local with remote modules inside. With `skip_nonfinite` a step is refused if a gradient is
    not finite. A step is also refused if a worker has no gradients, unless `allow_missing`.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: ParamsEntry | Iterable[ParamsEntry],
        *,
        skip_nonfinite: bool = False,
        allow_missing: bool = False,
        **defaults: Any,
    ) -> None:
        if _needs_closure(optimizer_class):
            raise TypeError(
                f"{optimizer_class.__name__} needs a closure that runs the model several times in a step, "
                "which is not supported"
            )
        groups = [ParameterGroup(item) for item in as_groups(params)]
        if not any(group.local or group.remote for group in groups):
            raise ValueError("there are no parameters to optimize")
        placeholders = [torch.zeros(1, 1, requires_grad=True) for _ in groups]
        template = optimizer_class(
            [{"params": [p], **group.options} for p, group in zip(placeholders, groups, strict=True)],
            **defaults,
        )
        self._is_initialized = False
        self._remote: list[RemoteOptimizer] = []
        super().__init__(
            [{"params": [p], **group.options} for p, group in zip(placeholders, groups, strict=True)],
            template.defaults,
        )
        self._is_initialized = True
        for param_group, group in zip(self.param_groups, groups, strict=True):
            param_group["params"] = group.params
        self._optimizer_class = optimizer_class
        self._constructor_defaults = defaults
        self._groups = groups
        self._skip_nonfinite = skip_nonfinite
        self._allow_missing = allow_missing
        self._stepping = threading.Lock()
        self._tickets = itertools.count(1)
        """A ticket names one attempt to step on all workers: prepare, commit, abort and outcome refer to
        it."""
        self._local = LocalOptimizer(optimizer_class, self.param_groups, defaults, groups)
        self._remote = self._optimizers_for_new_workers(groups)
        wait_for_all([remote.start_creating(resume=False) for remote in self._remote])

    def _optimizers_for_new_workers(self, groups: Sequence[ParameterGroup]) -> list[RemoteOptimizer]:
        """An optimizer for each worker that has modules of the groups and no optimizer yet."""
        # By the worker's id: there may be several handles to one worker, with different links.
        workers = {link_of(ref.worker).peer.id: ref.worker for group in groups for ref in group.remote}
        for remote in self._remote:
            workers.pop(remote.peer, None)
        return [
            RemoteOptimizer(peer, worker, self._optimizer_class, self._constructor_defaults, groups)
            for peer, worker in workers.items()
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of modules and tensors, as the constructor takes it.

        The state of the other groups stays. If a worker cannot add its modules, the group is added nowhere.
        """
        if not self._is_initialized:  # called by the constructor of torch's own class
            super().add_param_group(param_group)
            return
        with self._stepping:
            new = ParameterGroup(param_group)
            if not new.params:
                raise ValueError("there are no parameters to optimize in the group")
            if any(map(new.overlaps, self._groups)):
                raise ValueError("some parameters appear in more than one parameter group")
            placeholder = {"params": [torch.zeros(1, 1, requires_grad=True)], **new.options}
            self._optimizer_class([placeholder], **self._constructor_defaults)  # raises for a wrong option
            self._local.check_group(new)
            self._add_on_workers(new)
            super().add_param_group(placeholder)
            self.param_groups[-1]["params"] = new.params
            self._local.add_group(self.param_groups[-1], new)
            self._groups.append(new)

    def _add_on_workers(self, new: ParameterGroup) -> None:
        groups = [*self._groups, new]
        added = self._optimizers_for_new_workers(groups)
        calls = [remote.start_set_groups(groups) for remote in self._remote]
        calls += [remote.start_creating(resume=False) for remote in added]
        try:
            wait_for_all(calls)
        except BaseException:
            with without_deadline():
                linked = [remote for remote in self._remote if remote.is_linked]
                CompletedCalls([remote.start_set_groups(self._groups) for remote in linked])
            raise
        self._remote += added

    # -- the step

    _step_supports_amp_scaling = True
    """Makes a `torch.amp.GradScaler` set `found_inf` on this optimizer before a step, and `grad_scale` if the
    optimizer has to unscale the gradients itself."""

    def step(self, context: Context | None = None) -> None:  # type: ignore[override]
        """Steps all parameters with the gradients of plain backward, or with those of a context.

        Raises `StepRefused` if the step was made nowhere, and `StepTorn` if it was made on some workers only
        or in part, or may have been. In both cases the parameters in this process are unchanged, unless the
        optimizer in this process raised in the middle of its step.
        """
        if callable(context):
            raise TypeError("a closure is not supported: run backward first, then step")
        try:
            self._step(context)
        except BaseException:
            # A GradScaler deletes these only after a step that succeeded. Otherwise the next step would use
            # them.
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
            return  # as torch does: no parameter is stepped, here or on any worker
        scale: torch.Tensor | None = vars(self).get("grad_scale")
        inverse_scale = None if scale is None else float(scale.double().reciprocal().float())
        with self._stepping, _in_context(context):
            local = self._local.gradients(context)
            if inverse_scale is not None:
                local = self._local.unscaled(local, inverse_scale)
            self._local.check(local, self._skip_nonfinite)
            settings = self._step_settings(inverse_scale)
            left = deadline()
            give_up_at = time.monotonic() + (_STEP_SECONDS if left is None else left)
            for attempt in itertools.count():
                try:
                    # Ctrl-C must not leave the step made on some workers only. A worker that is gone is
                    # waited for until it counts as lost.
                    with Uninterrupted():
                        if self._remote:
                            step = DistributedStep(next(self._tickets), self._remote, settings)
                            step.make(in_turn=attempt > 0)
                        self._local.step(local)
                    return
                except StepRefused as refused:
                    if refused.reason != "busy" or time.monotonic() >= give_up_at:
                        raise
                    # Another trainer steps. The random delay keeps waiting trainers from retrying together.
                    time.sleep(between(0, min(0.001 * 2**attempt, 0.1)))

    def _step_settings(self, inverse_scale: float | None) -> StepSettings:
        return {
            "options": [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups],
            "skip_nonfinite": self._skip_nonfinite,
            "allow_missing": self._allow_missing,
            "inverse_scale": inverse_scale,
        }

    # -- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of plain backward, and those of the context that was entered, if any.

        It does so here and on all workers.
        """
        calls = [remote.start("zero_grad") for remote in self._remote]
        current = current_context()
        if is_explicit(current.id):
            current.zero_grad(self._local.parameters)
        if self._local.optimizer is not None:
            self._local.optimizer.zero_grad(set_to_none)
        wait_for_all(calls)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        context: Context | None = None,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scales all gradients, here and on workers, so that their norm is at most `max_norm`.

        The norm is one norm over all parameters, as if all were in this process. Returns the norm before
        scaling.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be more than 0, not {norm_type}")
        with _in_context(context):
            calls = [remote.start("sum_of_powers", norm_type) for remote in self._remote]
            local = self._local.gradients(context)
            sums = [sum_of_powers(local.values(), norm_type), *wait_for_all(calls)]
            # Python's max may drop a NaN, and the sum does not.
            total = sum(sums) if math.isnan(sum(sums)) or math.isfinite(norm_type) else max(sums)
            norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
            if error_if_nonfinite and not math.isfinite(norm):
                raise RuntimeError(f"the norm of the gradients is {norm}, so they cannot be clipped")
            factor = max_norm / (norm + 1e-6)
            if not factor >= 1.0:
                calls = [remote.start("scale_gradients", factor) for remote in self._remote]
                self._local.scale(local, factor, context)
                wait_for_all(calls)
        return torch.tensor(norm, dtype=torch.float64)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizers here and on all workers, as one dict in this process."""
        calls = [remote.start("state_dict") for remote in self._remote]
        return {
            "param_groups": [
                {k: v for k, v in group.items() if k != "params"} for group in self.param_groups
            ],
            "local": self._local.optimizer.state_dict() if self._local.optimizer else None,
            "remote": wait_for_all(calls),
        }

    def state_parts(self) -> Iterator[tuple[str, Any]]:
        """The items of `state_dict`, with an iterator that fetches the states of the workers one at a
        time."""
        yield "param_groups", [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        yield "local", self._local.optimizer.state_dict() if self._local.optimizer else None
        yield "remote", (remote.start("state_dict")() for remote in self._remote)

    def group_sizes(self) -> tuple[list[int] | None, list[tuple[str, list[int]]]]:
        """How many tensors each group has: here (None without an optimizer here), and on each worker."""
        calls = [remote.start("group_sizes") for remote in self._remote]
        local = self._local.optimizer
        here = None if local is None else [len(group["params"]) for group in local.param_groups]
        return here, [(p.worker.target, s) for p, s in zip(self._remote, wait_for_all(calls), strict=True)]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, here and on all workers."""
        if len(state_dict["remote"]) != len(self._remote) or len(state_dict["param_groups"]) != len(
            self.param_groups
        ):
            raise ValueError("the state is of an optimizer over other workers or groups")
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        if self._local.optimizer is not None:
            self._local.optimizer.load_state_dict(state_dict["local"])
        wait_for_all(
            [
                remote.start("load_state_dict", saved)
                for remote, saved in zip(self._remote, state_dict["remote"], strict=True)
            ]
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer with parts on workers cannot be copied or pickled; use its state_dict")

    def __repr__(self) -> str:
        remote = [f"{len(remote.modules)} modules on {remote.worker.target}" for remote in self._remote]
        local = len(self._local.parameters)
        return f"DistributedOptimizer({local} tensors here, {', '.join(remote) or 'none on workers'})"


def _in_context(context: Context | None) -> AbstractContextManager[None]:
    return nullcontext() if context is None else entered(current_scope()._replace(context=context.id))


def _needs_closure(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
