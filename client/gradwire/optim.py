"""Optimizers over parameters here and on workers, stepped all together or not at all."""

from __future__ import annotations

import itertools
import math
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from gradwire import _calls
from gradwire._contexts import Context
from gradwire._refs import RemoteRef
from gradwire._scope import current_scope, entered, time_left
from gradwire._workers import RemoteWorker
from gradwire.errors import GradwireError, LinkError, NotFound, StepRefused
from gradwire.nn import RemoteModule
from gradwire.proto.v1 import autograd_pb2

__all__ = ["DistributedOptimizer", "sum_of_powers"]

_PATIENCE_SECONDS = 0.2
"""How long a worker waits for another trainer's step before it says that it is busy."""
_STEP_SECONDS = 60.0
"""How long a step is tried again while workers are busy, unless a deadline is nearer."""

Item = torch.nn.Module | torch.Tensor | Mapping[str, Any]


class DistributedOptimizer(torch.optim.Optimizer):
    """A `torch.optim` optimizer over modules here and on workers.

    The state lives beside the parameters. `step` is made everywhere or nowhere: if one worker cannot step,
    none does, and `StepRefused` or `WorkerLost` says who and why. Learning-rate schedulers work on it.

    `params` are modules (local ones, that may contain remote ones; remote ones), local tensors, or groups:
    ``{"params": [decoder], "lr": 1e-4}``. With `skip_nonfinite`, gradients that are not finite make a step
    fail rather than spoil the parameters. A worker without any gradients makes a step fail, too, unless
    `allow_missing`.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Sequence[Item],
        *,
        skip_nonfinite: bool = False,
        allow_missing: bool = False,
        **defaults: Any,
    ) -> None:
        groups = [_Group(item) for item in _as_groups(params)]
        if not any(group.local or group.remote for group in groups):
            raise ValueError("there are no parameters to optimize")
        stand_in = [torch.zeros(1, requires_grad=True) for _ in groups]
        template = optimizer_class(
            [{"params": [p], **group.options} for p, group in zip(stand_in, groups, strict=True)], **defaults
        )
        super().__init__(
            [{"params": [p], **group.options} for p, group in zip(stand_in, groups, strict=True)],
            template.defaults,
        )
        for shown, group in zip(self.param_groups, groups, strict=True):
            shown["params"] = group.local
        self._skip_nonfinite = skip_nonfinite
        self._allow_missing = allow_missing
        self._tickets = itertools.count(1)
        self._local = _LocalPart(optimizer_class, self.param_groups, defaults)
        workers = {id(r.worker._place): r.worker for group in groups for r in group.remote}
        self._remote = [
            _RemotePart(worker, optimizer_class.__name__, defaults, groups) for worker in workers.values()
        ]
        _all([part.start_make(resume=False) for part in self._remote])

    # -- the step

    def step(self, context: Context | None = None) -> None:  # type: ignore[override]
        """Steps all parameters with the gradients of plain backward, or with those of a context."""
        if callable(context):
            raise TypeError("a closure is not supported: run backward first, then step")
        with _in_context(context):
            local = self._local.gradients(context)
            self._local.check(local, self._skip_nonfinite)
            self._step_remote()
            self._local.step(local)

    def _step_remote(self) -> None:
        left = time_left(None)
        give_up_at = time.monotonic() + (_STEP_SECONDS if left is None else left)
        for attempt in itertools.count():
            try:
                if len(self._remote) == 1:
                    self._remote[0].step(self._checks())
                else:
                    self._prepare_and_commit(next(self._tickets))
                return
            except StepRefused as refused:
                if refused.reason != "busy" or time.monotonic() >= give_up_at:
                    raise
                # Two trainers that each hold what the other waits for: both let go, and come back apart.
                time.sleep(random.uniform(0, min(0.01 * 2**attempt, 0.5)))

    def _prepare_and_commit(self, ticket: int) -> None:
        prepared, failures = _settle([part.start_prepare(ticket, self._checks()) for part in self._remote])
        if failures:
            _settle([self._remote[index].start_abort(ticket) for index in prepared])
            raise _who_and_why([(self._remote[index], error) for index, error in failures])
        made, failures = _settle([part.start_commit(ticket) for part in self._remote])
        if failures:
            refused = _who_and_why([(self._remote[index], error) for index, error in failures])
            if made:
                # They had agreed, so this takes a death (or a broken optimizer) between yes and commit.
                done = ", ".join(self._remote[index].worker.target for index in made)
                refused.message += f". It was made on {done}: go on from a checkpoint"
            raise refused

    def _checks(self) -> tuple[list[dict[str, Any]], bool, bool]:
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return options, self._skip_nonfinite, self._allow_missing

    # -- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, here and on all workers."""
        calls = [part.start("zero_grad") for part in self._remote]
        if self._local.optimizer is not None:
            self._local.optimizer.zero_grad(set_to_none)
        _all(calls)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, context: Context | None = None
    ) -> torch.Tensor:
        """Scales all gradients, here and on workers, so that their common norm is at most `max_norm`.

        Returns the norm that they had together: one norm over all parameters, as if all were here.
        """
        with _in_context(context):
            calls = [part.start("sum_of_powers", norm_type) for part in self._remote]
            local = self._local.gradients(context)
            parts = [sum_of_powers(local.values(), norm_type), *_all(calls)]
            norm = max(parts) if math.isinf(norm_type) else sum(parts) ** (1.0 / norm_type)
            factor = max_norm / (norm + 1e-6)
            if factor < 1.0:
                calls = [part.start("scale_gradients", factor) for part in self._remote]
                self._local.scale(local, factor, context)
                _all(calls)
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
            "remote": _all(calls),
        }

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
        _all(
            [
                part.start("load_state_dict", saved)
                for part, saved in zip(self._remote, state_dict["remote"], strict=True)
            ]
        )

    def __repr__(self) -> str:
        places = [f"{len(part.modules)} modules on {part.worker.target}" for part in self._remote]
        local = sum(len(group["params"]) for group in self.param_groups)
        return f"DistributedOptimizer({local} tensors here, {', '.join(places) or 'none on workers'})"


class _Group:
    """One parameter group: local tensors and remote modules."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.options = {key: value for key, value in item.items() if key != "params"}
        self.local: list[torch.Tensor] = []
        self.remote: list[RemoteModule] = []
        members = item["params"]
        if isinstance(members, torch.nn.Module | torch.Tensor):
            members = [members]
        for member in members:
            if isinstance(member, torch.Tensor):
                self.local.append(member)
            elif isinstance(member, torch.nn.Module):
                # remove_duplicate: tied parameters are stepped once.
                self.local.extend(member.parameters())
                self.remote.extend(m for m in member.modules() if isinstance(m, RemoteModule))
            else:
                raise TypeError(f"a {type(member).__name__} is neither a module nor a tensor")


def _as_groups(params: Sequence[Item]) -> list[Mapping[str, Any]]:
    """Groups stay as they are; what is in none makes one together."""
    items = [params] if isinstance(params, torch.nn.Module | torch.Tensor | Mapping) else list(params)
    loose = [item for item in items if not isinstance(item, Mapping)]
    groups = [item for item in items if isinstance(item, Mapping)]
    return [*([{"params": loose}] if loose else []), *groups]


class _LocalPart:
    """The parameters in this process."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        shown_groups: Sequence[dict[str, Any]],
        defaults: Mapping[str, Any],
    ) -> None:
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.optimizer: torch.optim.Optimizer | None = None
        with_parameters = [group for group in shown_groups if group["params"]]
        if with_parameters:
            self.optimizer = optimizer_class([dict(group) for group in with_parameters], **defaults)
            self._pairs = list(zip(with_parameters, self.optimizer.param_groups, strict=True))

    def gradients(self, context: Context | None) -> dict[torch.Tensor, torch.Tensor]:
        if context is not None:
            found = context.gradients()
            return {p: found[p] for p in self._parameters() if p in found}
        return {p: p.grad for p in self._parameters() if p.grad is not None}

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (parameter for shown, _ in self._pairs for parameter in shown["params"])

    def check(self, gradients: Mapping[torch.Tensor, torch.Tensor], skip_nonfinite: bool) -> None:
        if skip_nonfinite and not all(torch.isfinite(_values(g)).all() for g in gradients.values()):
            error = StepRefused("gradients in this process are not finite; no worker has stepped")
            error.reason = "nonfinite"
            raise error

    def scale(
        self, gradients: Mapping[torch.Tensor, torch.Tensor], factor: float, context: Context | None
    ) -> None:
        if context is not None:
            context.scale_gradients(gradients, factor)
        else:
            for gradient in gradients.values():
                gradient.mul_(factor)

    def step(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        if self.optimizer is None:
            return
        for shown, own in self._pairs:
            own.update({key: value for key, value in shown.items() if key != "params"})
        before = [(parameter, parameter.grad) for parameter in self._parameters()]
        try:
            for parameter, _ in before:
                parameter.grad = gradients.get(parameter)
            self.optimizer.step()
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient


class _RemotePart:
    """The parameters on one worker."""

    def __init__(
        self, worker: RemoteWorker, class_name: str, defaults: Mapping[str, Any], groups: Sequence[_Group]
    ) -> None:
        self.worker = worker
        self.modules = [m for group in groups for m in group.remote if m.worker._place is worker._place]
        self._uid = uuid.uuid4().hex
        self._arguments = (
            class_name,
            dict(defaults),
            [
                {
                    "modules": [m for m in group.remote if m.worker._place is worker._place],
                    **group.options,
                }
                for group in groups
            ],
        )
        self._ref: RemoteRef | None = None

    def start_make(self, *, resume: bool) -> Callable[[], Any]:
        """Makes the optimizer there. With `resume`, from what the worker last knew of it."""
        future = self.worker._start(
            "gradwire.optimizer", (self._uid, *self._arguments, resume), {}, keep=autograd_pb2.Keep()
        )

        def finish() -> None:
            self._ref = _calls.wait(future, f"an optimizer on {self.worker.target}")

        return finish

    def start(self, method: str, *args: object) -> Callable[[], Any]:
        """Starts a call of the optimizer there; what is returned waits for it.

        A worker that was restarted has forgotten it: then it is made again, from the state that the worker
        saved, and asked once more.
        """
        assert self._ref is not None
        try:
            future: _calls.CallFuture | GradwireError = self._ref.call_async(method, *args)
        except GradwireError as error:
            future = error

        def finish() -> Any:
            try:
                if isinstance(future, GradwireError):
                    raise future
                return _calls.wait(future, f"the optimizer on {self.worker.target}")
            except (NotFound, LinkError):
                self.start_make(resume=True)()
                assert self._ref is not None
                return self._ref.call(method, *args)

        return finish

    def step(self, checks: tuple[list[dict[str, Any]], bool, bool]) -> None:
        try:
            self.start("step", *checks, _PATIENCE_SECONDS)()
        except GradwireError as error:
            raise _who_and_why([(self, error)]) from error

    def start_prepare(
        self, ticket: int, checks: tuple[list[dict[str, Any]], bool, bool]
    ) -> Callable[[], Any]:
        return self.start("prepare", ticket, *checks, _PATIENCE_SECONDS)

    def start_commit(self, ticket: int) -> Callable[[], Any]:
        return self.start("commit", ticket)

    def start_abort(self, ticket: int) -> Callable[[], Any]:
        return self.start("abort", ticket)


def _settle(
    calls: Sequence[Callable[[], Any]],
) -> tuple[list[int], list[tuple[int, GradwireError]]]:
    """Waits for all; the indices of those that worked, and of those that did not with their errors."""
    worked: list[int] = []
    failed: list[tuple[int, GradwireError]] = []
    for index, call in enumerate(calls):
        try:
            call()
            worked.append(index)
        except GradwireError as error:
            failed.append((index, error))
    return worked, failed


def _all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    return [call() for call in calls]


def _who_and_why(failures: Sequence[tuple[_RemotePart, GradwireError]]) -> StepRefused:
    """One error for all that kept a step from being made."""
    reasons = [_reason(error) for _, error in failures]
    said = "; ".join(f"{part.worker.target}: {error}" for part, error in failures)
    refused = StepRefused(f"the step was not made: {said}", worker=failures[0][0].worker.target)
    # A reason that does not pass by itself outweighs "busy".
    refused.reason = next((reason for reason in reasons if reason != "busy"), "busy")
    refused.__cause__ = failures[0][1]
    return refused


def _reason(error: GradwireError) -> str:
    if isinstance(error, StepRefused):
        return error.reason
    return "lost" if isinstance(error, LinkError) else "error"


def _in_context(context: Context | None) -> AbstractContextManager[None]:
    return nullcontext() if context is None else entered(replace(current_scope(), context=context.id))


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def sum_of_powers(gradients: Iterable[torch.Tensor], norm_type: float) -> float:
    """The part of some gradients in a norm over many, in double precision."""
    total = 0.0
    for gradient in gradients:
        magnitudes = _values(gradient).detach().abs().double()
        if not magnitudes.numel():
            continue
        if math.isinf(norm_type):
            total = max(total, float(magnitudes.max()))
        else:
            total += float(magnitudes.pow(norm_type).sum())
    return total
