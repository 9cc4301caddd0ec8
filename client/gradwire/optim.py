"""Optimizers over parameters here and on workers, stepped all together or not at all."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch

from gradwire import _calls
from gradwire._contexts import Context
from gradwire._refs import RemoteRef
from gradwire._scope import current_scope, entered, time_left
from gradwire._workers import RemoteWorker
from gradwire.errors import GradwireError, LinkError, NotFound, StepRefused
from gradwire.nn import RemoteParameters
from gradwire.proto.v1 import autograd_pb2

__all__ = ["DistributedOptimizer", "Rehearsal", "sum_of_powers"]

_PATIENCE_SECONDS = 0.2
"""How long a worker that is asked alone waits for another trainer's step before it says that it is busy."""
_SHORT_PATIENCE_SECONDS = 0.02
"""The same where all workers are asked at once: two trainers may each hold what the other waits for."""
_ABORT_SECONDS = 5.0
"""How long to try to tell a worker that a step is given up; it also learns that from the next one."""
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
        groups = [_Group(item) for item in _as_groups(params)]
        if not any(group.local or group.remote for group in groups):
            raise ValueError("there are no parameters to optimize")
        stand_in = [torch.zeros(1, 1, requires_grad=True) for _ in groups]
        template = optimizer_class(
            [{"params": [p], **group.options} for p, group in zip(stand_in, groups, strict=True)], **defaults
        )
        self._is_made = False
        super().__init__(
            [{"params": [p], **group.options} for p, group in zip(stand_in, groups, strict=True)],
            template.defaults,
        )
        self._is_made = True
        for shown, group in zip(self.param_groups, groups, strict=True):
            shown["params"] = list(group.local)
        self._skip_nonfinite = skip_nonfinite
        self._allow_missing = allow_missing
        self._stepping = threading.Lock()
        self._tickets = itertools.count(1)
        names = {parameter: name for group in groups for parameter, name in group.local.items()}
        self._local = _LocalPart(optimizer_class, self.param_groups, defaults, names)
        # By the worker itself: there may be several handles to it, with links of their own.
        workers = {ref.worker._link.peer.node: ref.worker for group in groups for ref in group.remote}
        self._remote = [
            _RemotePart(node, worker, optimizer_class, defaults, groups) for node, worker in workers.items()
        ]
        _all([part.start_make(resume=False) for part in self._remote])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_made:
            raise NotImplementedError("all groups are given when the optimizer is made")
        super().add_param_group(param_group)

    # -- the step

    def step(self, context: Context | None = None) -> None:  # type: ignore[override]
        """Steps all parameters with the gradients of plain backward, or with those of a context."""
        if callable(context):
            raise TypeError("a closure is not supported: run backward first, then step")
        with self._stepping, _in_context(context):
            local = self._local.gradients(context)
            self._local.check(local, self._skip_nonfinite)
            interrupted = self._step_remote()
            self._local.step(local)
        if interrupted is not None:
            raise interrupted

    def _step_remote(self) -> KeyboardInterrupt | None:
        left = time_left(None)
        give_up_at = time.monotonic() + (_STEP_SECONDS if left is None else left)
        for attempt in itertools.count():
            try:
                if not self._remote:
                    return None
                if len(self._remote) == 1 and left is None:
                    return self._step_one(self._remote[0])
                return self._prepare_and_commit(next(self._tickets), in_turn=attempt > 0)
            except StepRefused as refused:
                if refused.reason != "busy" or time.monotonic() >= give_up_at:
                    raise
                # Another trainer steps; come back apart from whoever else waits for the same.
                time.sleep(random.uniform(0, min(0.001 * 2**attempt, 0.1)))
        raise AssertionError  # mypy: the count has no end

    def _step_one(self, part: _RemotePart) -> KeyboardInterrupt | None:
        """One request. Once it is sent it counts, so nothing may keep this process from the answer."""
        settled = _Settled([part.start("step", *self._checks(), _PATIENCE_SECONDS)], stubborn=True)
        for _, error in settled.failed:
            raise _who_and_why([(part, error)])
        return settled.interrupted

    def _prepare_and_commit(self, ticket: int, *, in_turn: bool) -> KeyboardInterrupt | None:
        """Asks all workers whether they can step, then tells them to.

        At first all at once. If another trainer was in the way, one after the other, in the order that all
        trainers keep to: so they wait for one another, but never in a circle.
        """
        parts = sorted(self._remote, key=lambda part: part.node) if in_turn else self._remote
        groups = [[part] for part in parts] if in_turn else [parts]
        patience = _PATIENCE_SECONDS if in_turn else _SHORT_PATIENCE_SECONDS
        asked: list[_RemotePart] = []
        try:
            for group in groups:
                asked += group
                settled = _Settled(
                    [part.start("prepare", ticket, *self._checks(), patience) for part in group]
                )
                if settled.failed:
                    raise _who_and_why([(group[index], error) for index, error in settled.failed])
        except BaseException:
            self._abort(ticket, asked)
            raise
        return self._commit(ticket)

    def _abort(self, ticket: int, parts: Sequence[_RemotePart]) -> None:
        with _without_deadline():
            calls = [part.start("abort", ticket, timeout=_ABORT_SECONDS) for part in parts if part.is_linked]
            _Settled(calls)

    def _commit(self, ticket: int) -> KeyboardInterrupt | None:
        # All have agreed: from here on no deadline and no key may leave some stepped and some not.
        with _without_deadline():
            settled = _Settled([part.start("commit", ticket) for part in self._remote], stubborn=True)
        if settled.failed:
            refused = _who_and_why([(self._remote[index], error) for index, error in settled.failed])
            if settled.worked:
                # They had agreed, so this takes a death (or a broken optimizer) between yes and commit.
                done = ", ".join(self._remote[index].worker.target for index in settled.worked)
                refused.message += f". It was made on {done}: go on from a checkpoint"
            raise refused
        return settled.interrupted

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
            parts = [sum_of_powers(local.values(), norm_type), *_all(calls)]
            # A NaN must not get lost, as it may in Python's max.
            total = sum(parts) if math.isnan(sum(parts)) or math.isfinite(norm_type) else max(parts)
            norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
            if error_if_nonfinite and not math.isfinite(norm):
                raise RuntimeError(f"the norm of the gradients is {norm}, so they cannot be clipped")
            factor = max_norm / (norm + 1e-6)
            if not factor >= 1.0:
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
        return here, [(p.worker.target, s) for p, s in zip(self._remote, _all(calls), strict=True)]

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

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an optimizer with parts on workers cannot be copied or pickled; use its state_dict")

    def __repr__(self) -> str:
        places = [f"{len(part.modules)} modules on {part.worker.target}" for part in self._remote]
        local = sum(len(group["params"]) for group in self.param_groups)
        return f"DistributedOptimizer({local} tensors here, {', '.join(places) or 'none on workers'})"


class _Group:
    """One parameter group: local tensors and remote modules, each once."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.options = {key: value for key, value in item.items() if key != "params"}
        self.local: dict[torch.Tensor, str] = {}
        """With their names, as far as they have any."""
        self._remote: dict[tuple[int, int], RemoteRef] = {}
        members = item["params"]
        if isinstance(members, torch.nn.Module | torch.Tensor):
            members = [members]
        for member in members:
            if isinstance(member, torch.nn.Module):
                for name, parameter in member.named_parameters():
                    self._add(parameter, name)
            elif isinstance(member, torch.Tensor):
                self._add(member, f"a tensor of shape {tuple(member.shape)}")
            else:
                raise TypeError(f"a {type(member).__name__} is neither a module nor a tensor")

    def _add(self, parameter: torch.Tensor, name: str) -> None:
        if isinstance(parameter, RemoteParameters):
            ref = parameter.ref
            self._remote.setdefault((ref._message.node.id, ref._message.ref), ref)
        else:
            self.local.setdefault(parameter, name)

    @property
    def remote(self) -> list[RemoteRef]:
        return list(self._remote.values())


def _as_groups(params: Iterable[Item]) -> list[Mapping[str, Any]]:
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
        names: Mapping[torch.Tensor, str],
    ) -> None:
        self._names = names
        self._pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.optimizer: torch.optim.Optimizer | None = None
        with_parameters = [group for group in shown_groups if group["params"]]
        if with_parameters:
            self.optimizer = optimizer_class([dict(group) for group in with_parameters], **defaults)
            self._pairs = list(zip(with_parameters, self.optimizer.param_groups, strict=True))
            self._rehearsal = Rehearsal(self.optimizer)

    def gradients(self, context: Context | None) -> dict[torch.Tensor, torch.Tensor]:
        if context is not None:
            found = context.gradients()
            return {p: found[p] for p in self._parameters() if p in found}
        return {p: p.grad for p in self._parameters() if p.grad is not None}

    def _parameters(self) -> Iterable[torch.Tensor]:
        return (parameter for shown, _ in self._pairs for parameter in shown["params"])

    def check(self, gradients: Mapping[torch.Tensor, torch.Tensor], skip_nonfinite: bool) -> None:
        """Raises StepRefused if a step could not be made here, before any worker makes one."""
        if self.optimizer is None:
            return
        if skip_nonfinite:
            bad = [p for p, gradient in gradients.items() if not torch.isfinite(_values(gradient)).all()]
            if bad:
                names = ", ".join(self._names[parameter] for parameter in bad[:5])
                _refuse("nonfinite", f"the gradients of {names} in this process are not finite")
        for shown, own in self._pairs:
            own.update({key: value for key, value in shown.items() if key != "params"})
        refusal = self._rehearsal.refusal(gradients)
        if refusal is not None:
            _refuse("error", f"in this process: {refusal}")

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
        self,
        node: int,
        worker: RemoteWorker,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        groups: Sequence[_Group],
    ) -> None:
        self.node = node
        self.worker = worker
        here = [[ref for ref in group.remote if ref.worker._link.peer.node == node] for group in groups]
        self.modules = [ref for refs in here for ref in refs]
        self._uid = uuid.uuid4().hex
        name = optimizer_class.__name__
        self._arguments = (
            f"torch.optim.{name}" if getattr(torch.optim, name, None) is optimizer_class else name,
            dict(defaults),
            [{"modules": refs, **group.options} for refs, group in zip(here, groups, strict=True)],
        )
        self._ref: RemoteRef | None = None

    @property
    def is_linked(self) -> bool:
        """Whether it can be asked without connecting anew."""
        link = self.worker._place.link
        return link is not None and link.ended is None

    def start_make(self, *, resume: bool) -> Callable[[], Any]:
        """Makes the optimizer there. With `resume`, from what the worker last knew of it."""
        future = self.worker._start(
            "gradwire.optimizer", (self._uid, *self._arguments, resume), {}, keep=autograd_pb2.Keep()
        )

        def finish() -> None:
            self._ref = _calls.wait(future, f"an optimizer on {self.worker.target}")

        return finish

    def start(self, method: str, *args: object, timeout: float | None = None) -> Callable[[], Any]:
        """Starts a call of the optimizer there; what is returned waits for it.

        A worker that was restarted has forgotten it: then it is made again, from the state that the worker
        saved, and asked once more. So it is if the link was lost, but only what may be done twice.
        """
        assert self._ref is not None
        try:
            future: _calls.CallFuture | GradwireError = self._ref.call_async(method, *args, timeout=timeout)
        except GradwireError as error:
            future = error

        def finish() -> Any:
            try:
                if isinstance(future, GradwireError):
                    raise future
                # Not _calls.wait: an interrupt must not cancel a step that others make, too.
                return future.result()
            except (NotFound, LinkError) as error:
                if method not in _ASKED_AGAIN or (isinstance(error, LinkError) and method not in _REPEATABLE):
                    raise
                self.start_make(resume=True)()
                assert self._ref is not None
                return self._ref.call(method, *args)

        return finish


_REPEATABLE = ("zero_grad", "state_dict", "load_state_dict", "group_sizes")
"""What does no harm if it was done already when the link was lost."""
_ASKED_AGAIN = (*_REPEATABLE, "prepare", "step", "sum_of_powers")
"""What an optimizer that was made anew can answer."""


class _Settled:
    """Waits for all calls, whatever becomes of each.

    With `stubborn` also through Ctrl-C, which is then left to the caller to raise.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], *, stubborn: bool = False) -> None:
        self.results: list[Any] = []
        self.worked: list[int] = []
        self.failed: list[tuple[int, GradwireError]] = []
        self.interrupted: KeyboardInterrupt | None = None
        for index, call in enumerate(calls):
            while True:
                try:
                    self.results.append(call())
                    self.worked.append(index)
                except GradwireError as error:
                    self.failed.append((index, error))
                except KeyboardInterrupt as interrupt:
                    if not stubborn:
                        raise
                    self.interrupted = interrupt
                    continue
                break


def _all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all calls. If some fail, the first error, once none is under way any more."""
    settled = _Settled(calls)
    for _, error in settled.failed:
        raise error
    return settled.results


def _who_and_why(failures: Sequence[tuple[_RemotePart, GradwireError]]) -> StepRefused:
    """One error for all that kept a step from being made."""
    reasons = [_reason(error) for _, error in failures]
    # A reason that does not pass by itself outweighs "busy".
    first = next((index for index, reason in enumerate(reasons) if reason != "busy"), 0)
    said = "; ".join(f"{part.worker.target}: {error}" for part, error in failures)
    refused = StepRefused(f"the step was not made: {said}", worker=failures[first][0].worker.target)
    refused.reason = reasons[first]
    refused.__cause__ = failures[first][1]
    return refused


def _refuse(reason: str, message: str) -> NoReturn:
    error = StepRefused(f"the step was not made: {message}")
    error.reason = reason
    raise error


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


class Rehearsal:
    """Finds out whether an optimizer can make a step, before it makes it.

    Adam, say, takes no sparse gradients, and says so only in the middle of a step, when other workers have
    made theirs. So a step with small tensors of the same kind is made first, once for each kind.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # One of the user's own may do anything in a step; it is not tried out behind their back.
        self._is_known = type(optimizer).__module__.startswith("torch.optim.")
        self._passed: set[object] = set()

    def refusal(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> str | None:
        """Why the step cannot be made; None if it can."""
        for parameter, gradient in gradients.items():
            if parameter.dtype != gradient.dtype or parameter.shape != gradient.shape:
                return (
                    f"a gradient of {tuple(gradient.shape)} {gradient.dtype} for a parameter of "
                    f"{tuple(parameter.shape)} {parameter.dtype}: it was changed since backward"
                )
        if not self._is_known:
            return None
        for group in self._optimizer.param_groups:
            pairs = ((p, gradients[p]) for p in group["params"] if p in gradients)
            kinds = {(p.dtype, p.dim(), p.device, gradient.layout) for p, gradient in pairs}
            options = {key: value for key, value in group.items() if key != "params"}
            switched_on = frozenset(key for key, value in options.items() if _is_on(value))
            for kind in kinds:
                if (kind, switched_on) not in self._passed:
                    try:
                        self._rehearse(options, *kind)
                    except (RuntimeError, ValueError, TypeError) as error:
                        return f"{type(self._optimizer).__name__}: {error}"
                    self._passed.add((kind, switched_on))
        return None

    def _rehearse(
        self,
        options: dict[str, Any],
        dtype: torch.dtype,
        dim: int,
        device: torch.device,
        layout: torch.layout,
    ) -> None:
        parameter = torch.nn.Parameter(torch.zeros([1] * dim, dtype=dtype, device=device))
        gradient = torch.zeros_like(parameter)
        parameter.grad = gradient if layout == torch.strided else gradient.to_sparse(layout=layout)
        copies = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()
        }
        type(self._optimizer)([{"params": [parameter], **copies}], **self._required()).step()

    def _required(self) -> dict[str, Any]:
        """What the constructor cannot do without."""
        parameters = inspect.signature(type(self._optimizer).__init__).parameters
        return {name: value for name, value in self._optimizer.defaults.items() if name in parameters}


def _is_on(option: object) -> bool:
    return True if isinstance(option, torch.Tensor) else bool(option)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def sum_of_powers(gradients: Iterable[torch.Tensor], norm_type: float) -> float:
    """The part of some gradients in a norm over many, in double precision."""
    parts = []
    for gradient in gradients:
        magnitudes = _values(gradient).detach().abs().double()
        if magnitudes.numel():
            parts.append(magnitudes.max() if math.isinf(norm_type) else magnitudes.pow(norm_type).sum())
    if not parts:
        return 0.0
    together = torch.stack([part.cpu() for part in parts])
    return float(together.max() if math.isinf(norm_type) else together.sum())
