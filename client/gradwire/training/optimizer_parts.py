"""The parts of a `DistributedOptimizer`: its groups, the optimizer here, and the optimizer on each worker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from typing import Any, NoReturn

import torch

from gradwire.api import calls
from gradwire.api.compression import compression
from gradwire.api.contexts import Context, current_context, is_explicit
from gradwire.api.refs import RemoteRef, message_of
from gradwire.api.workers import RemoteWorker, link_of, shared_link_of, start_remote
from gradwire.autograd import borrowed_grad
from gradwire.errors import GradwireError, LinkError, NotFound, StepRefused
from gradwire.peers.current import current_peer
from gradwire.peers.shared_links import Reconnect
from gradwire.runtime.scope import current_scope, entered
from gradwire.training.modules import RemoteParameters
from gradwire.training.stepping import DryRun, failed_step, unscaled, values_of
from gradwire.transport import Link

__all__ = [
    "CompletedCalls",
    "LocalOptimizer",
    "OptimizerCall",
    "ParameterGroup",
    "ParamsEntry",
    "RemoteOptimizer",
    "as_groups",
    "wait_for_all",
]

ParamsEntry = torch.nn.Module | torch.Tensor | Mapping[str, Any]
"""An entry of the `params` of an optimizer: a module, a tensor, or a group with its own options."""


class ParameterGroup:
    """One parameter group: local tensors and remote modules, each once."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.options = {key: value for key, value in group.items() if key != "params"}
        self.local: dict[torch.Tensor, str] = {}
        """The local tensors with the names that errors call them by."""
        self._remote: dict[tuple[int, int], RemoteParameters] = {}
        """The parameters of remote modules, by the worker's id and the ref of the module."""
        members = group["params"]
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
            message = message_of(parameter.ref)
            self._remote.setdefault((message.peer.id, message.ref), parameter)
        else:
            self.local.setdefault(parameter, name)

    @property
    def remote(self) -> list[RemoteRef]:
        """The remote modules."""
        return [parameters.ref for parameters in self._remote.values()]

    @property
    def params(self) -> list[torch.Tensor]:
        """The "params" of the group in `param_groups`: the local tensors, and a `RemoteParameters` for each
        remote module. A tool of torch that iterates over the parameters of an optimizer must not overlook the
        parameters on workers."""
        return [*self.local, *self._remote.values()]

    def overlaps(self, other: ParameterGroup) -> bool:
        """Whether the two groups have a tensor or a remote module in common."""
        return bool(self.local.keys() & other.local.keys() or self._remote.keys() & other._remote.keys())


def as_groups(params: ParamsEntry | Iterable[ParamsEntry]) -> list[Mapping[str, Any]]:
    """The `params` of an optimizer as groups. Modules and tensors outside of groups make one group
    together."""
    entries: list[ParamsEntry]
    entries = [params] if isinstance(params, torch.nn.Module | torch.Tensor | Mapping) else list(params)
    groups: list[Mapping[str, Any]] = [entry for entry in entries if isinstance(entry, Mapping)]
    ungrouped = [entry for entry in entries if not isinstance(entry, Mapping)]
    return [{"params": ungrouped}, *groups] if ungrouped else groups


class LocalOptimizer:
    """The optimizer over the parameters in this process. Without such parameters it does nothing."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        param_groups: Sequence[dict[str, Any]],
        defaults: Mapping[str, Any],
        groups: Sequence[ParameterGroup],
    ) -> None:
        """`param_groups` are those of the `DistributedOptimizer`, where schedulers change the options."""
        make: Callable[..., torch.optim.Optimizer] = optimizer_class
        self._make = partial(make, **defaults)
        self._names: dict[torch.Tensor, str] = {}
        self._param_groups: list[dict[str, Any]] = []
        """The entries of `param_groups` that have parameters in this process."""
        self.optimizer: torch.optim.Optimizer | None = None
        local = [(p, group) for p, group in zip(param_groups, groups, strict=True) if group.local]
        if local:
            self.optimizer = self._make(
                [{**param_group, "params": list(group.local)} for param_group, group in local]
            )
            self._dry_run = DryRun(self.optimizer)
        for param_group, group in local:
            self._remember(param_group, group)

    def _remember(self, param_group: dict[str, Any], group: ParameterGroup) -> None:
        self._param_groups.append(param_group)
        self._names.update(group.local)

    def check_group(self, group: ParameterGroup) -> None:
        """Raises the error of torch if the optimizer's class does not take a group's tensors or options."""
        if group.local:
            self._make([{**group.options, "params": list(group.local)}])

    def add_group(self, param_group: dict[str, Any], group: ParameterGroup) -> None:
        """Adds a group; `param_group` is its entry in the `param_groups` of the `DistributedOptimizer`."""
        if not group.local:
            return
        local_group = {**param_group, "params": list(group.local)}
        if self.optimizer is None:
            self.optimizer = self._make([local_group])
            self._dry_run = DryRun(self.optimizer)
        else:
            self.optimizer.add_param_group(local_group)
        self._remember(param_group, group)

    def gradients(self, context: Context | None) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of plain backward, or those of a context."""
        if context is not None:
            found = context.peek()
            return {p: found[p] for p in self.parameters if p in found}
        current = current_context()
        if is_explicit(current.id) and any(map(current.peek().__contains__, self.parameters)):
            raise TypeError(
                "the gradients of the parameters in this process are in the context that was entered: "
                "pass it as an argument"
            )
        return {p: p.grad for p in self.parameters if p.grad is not None}

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters in this process."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def unscaled(
        self, gradients: Mapping[torch.Tensor, torch.Tensor], inverse_scale: float
    ) -> dict[torch.Tensor, torch.Tensor]:
        """Unscaled copies of the gradients. `.grad` stays scaled, because the step may still be refused."""
        try:
            return {p: unscaled(gradient, inverse_scale)[0] for p, gradient in gradients.items()}
        except ValueError as error:
            _refuse("error", str(error))

    def check(self, gradients: Mapping[torch.Tensor, torch.Tensor], skip_nonfinite: bool) -> None:
        """Raises StepRefused if the step could not be made here, before any worker makes it."""
        if self.optimizer is None:
            return
        if skip_nonfinite:
            bad = [p for p, gradient in gradients.items() if not torch.isfinite(values_of(gradient)).all()]
            if bad:
                names = ", ".join(self._names[parameter] for parameter in bad[:5])
                _refuse("nonfinite", f"the gradients of {names} in this process are not finite")
        # The optimizer's groups are looked up each time: load_state_dict replaces them.
        for param_group, local_group in zip(self._param_groups, self.optimizer.param_groups, strict=True):
            local_group.update({key: value for key, value in param_group.items() if key != "params"})
        refusal = self._dry_run.refusal(gradients)
        if refusal is not None:
            _refuse("error", f"in this process: {refusal}")

    def scale(
        self, gradients: Mapping[torch.Tensor, torch.Tensor], factor: float, context: Context | None
    ) -> None:
        """Multiplies gradients of plain backward, or of a context, where they are kept."""
        if context is not None:
            context.scale_gradients(gradients, factor)
        else:
            for gradient in gradients.values():
                gradient.mul_(factor)

    def step(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Steps with these gradients. `.grad` is as before afterwards."""
        if self.optimizer is None:
            return
        with borrowed_grad(self.parameters):
            for parameter in self.parameters:
                parameter.grad = gradients.get(parameter)
            try:
                self.optimizer.step()
            except GradwireError as error:
                raise failed_step(error) from error


class RemoteOptimizer:
    """The optimizer over the parameters on one worker; the optimizer itself and its state live there."""

    def __init__(
        self,
        peer: int,
        worker: RemoteWorker,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        groups: Sequence[ParameterGroup],
    ) -> None:
        self.peer = peer
        self.worker = worker
        self._uid = uuid.uuid4().hex
        name = optimizer_class.__name__
        self._class_name = (
            f"torch.optim.{name}" if getattr(torch.optim, name, None) is optimizer_class else name
        )
        self._defaults = dict(defaults)
        self._groups = self._groups_on_worker(groups)
        self._ref: RemoteRef | None = None

    def _groups_on_worker(self, groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
        """The groups with their modules on this worker. A group without such modules is there with its
        options, so that groups have the same indices everywhere."""
        return [
            {"modules": [r for r in group.remote if link_of(r.worker).peer.id == self.peer], **group.options}
            for group in groups
        ]

    @property
    def modules(self) -> list[RemoteRef]:
        """The modules on this worker, of all groups."""
        return [ref for group in self._groups for ref in group["modules"]]

    def start_set_groups(self, groups: Sequence[ParameterGroup]) -> Callable[[], Any]:
        """Starts to replace the groups on the worker; the returned callable waits for that."""
        # Set before the request is sent: if the worker lost the optimizer, it is created again with these
        # groups.
        self._groups = self._groups_on_worker(groups)
        return self.start("set_groups", self._groups)

    @property
    def is_linked(self) -> bool:
        """Whether the worker can be reached over an open link."""
        link = shared_link_of(self.worker).link
        return link is not None and link.ended is None

    def start_creating(self, *, resume: bool) -> Callable[[], Any]:
        """Starts to create the optimizer on the worker; the returned callable waits for that.

        With `resume` the worker takes the state that it last had of this optimizer.
        """
        arguments = (self._uid, self._class_name, self._defaults, self._groups, resume)
        future = start_remote(self.worker, "gradwire.optimizer", *arguments)

        def finish() -> None:
            self._ref = calls.wait(future, f"an optimizer on {self.worker.target}")

        return finish

    def start(self, method: str, *args: object, timeout: float | None = None) -> OptimizerCall:
        """Starts a call of a method of the optimizer on the worker."""
        return OptimizerCall(self, method, args, timeout)

    def probe(self) -> None:
        """Raises WorkerLost unless a worker that was waited for in vain has come back."""
        shared_link_of(self.worker).get(Reconnect.PROBE)

    def outcome(self, ticket: int, seconds: float) -> str:
        """The `StepOutcome` of a step on the worker. A step that was not made will not be made later."""
        self.probe()
        with entered(current_scope()._replace(deadline=time.monotonic() + seconds)):
            outcome: str = self.start("outcome", ticket)()
        return outcome


class OptimizerCall:
    """A call of a method of an optimizer on a worker that was started; calling this object waits for the
    result.

    A worker that was restarted has no such optimizer any more. Then the optimizer is created again, from the
    state that the worker saved, and the call is repeated. If the link was lost, only idempotent methods are
    repeated, because the worker may have run the call.
    """

    def __init__(
        self, remote: RemoteOptimizer, method: str, args: tuple[object, ...], timeout: float | None
    ) -> None:
        self._remote = remote
        self._method = method
        self._args = args
        self._timeout = timeout
        self.was_sent = False
        """Whether the worker may have received the call."""
        self._future: calls.CallFuture | None = None
        self._error: GradwireError | None = None
        self._connecting: Future[Link] | None = None
        if remote.is_linked:
            self._send()
        else:
            # In another thread, so that several workers that cannot be reached are waited for at the same
            # time.
            self._context_variables = copy_context()
            self._connecting = current_peer().pool.submit(self._context_variables.run, link_of, remote.worker)

    def _send(self) -> None:
        assert self._remote._ref is not None
        try:
            with compression():  # switched off: the state must arrive exactly
                self._future = self._remote._ref.call_async(self._method, *self._args, timeout=self._timeout)
            self.was_sent = True
        except GradwireError as error:
            self._error = error

    def __call__(self) -> Any:
        if self._connecting is not None:
            self._connecting.result()
            self._context_variables.run(self._send)
        try:
            if self._future is None:
                assert self._error is not None
                raise self._error
            # Not calls.wait, which cancels on Ctrl-C: a step that other workers make must not be cancelled
            # here.
            return self._future.result()
        except (NotFound, LinkError) as error:
            if self._method not in _REPEATED_AFTER_RESTART:
                raise
            if isinstance(error, LinkError):
                if self._method not in _IDEMPOTENT:
                    raise
                self._remote.probe()
            self.was_sent = False
            self._remote.start_creating(resume=True)()
            assert self._remote._ref is not None
            self.was_sent = True
            with compression():
                return self._remote._ref.call(self._method, *self._args)


_IDEMPOTENT = ("set_groups", "zero_grad", "state_dict", "load_state_dict", "group_sizes", "outcome")
"""Methods that may run twice: they are repeated if the link was lost."""
_REPEATED_AFTER_RESTART = (*_IDEMPOTENT, "prepare", "step", "sum_of_powers")
"""Methods that are repeated on an optimizer that was created again, after the worker was restarted."""


class CompletedCalls:
    """The results and the errors of calls that were all waited for, even if some failed."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.results: list[Any] = []
        """The results of the calls that succeeded."""
        self.succeeded: list[int] = []
        """The indices of the calls that succeeded."""
        self.failed: list[tuple[int, GradwireError]] = []
        """The indices of the calls that failed, with their errors."""
        for index, call in enumerate(calls):
            try:
                self.results.append(call())
                self.succeeded.append(index)
            except GradwireError as error:
                self.failed.append((index, error))


def wait_for_all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Waits for all calls, and returns their results. Raises the first error if some failed."""
    completed = CompletedCalls(calls)
    for _, error in completed.failed:
        raise error
    return completed.results


def _refuse(reason: str, message: str) -> NoReturn:
    """Raises StepRefused."""
    error = StepRefused(f"the step was not made: {message}")
    error.reason = reason
    raise error
