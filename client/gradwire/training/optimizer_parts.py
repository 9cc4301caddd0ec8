"""The parts of a distributed optimizer: its groups, what it steps here, and what on each worker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from gradwire.api import calls
from gradwire.api.compression import compression
from gradwire.api.contexts import Context, current_context, is_explicit
from gradwire.api.refs import RemoteRef
from gradwire.api.workers import RemoteWorker
from gradwire.autograd import borrowed_grad
from gradwire.errors import GradwireError, LinkError, NotFound, StepRefused
from gradwire.peers.connections import Again
from gradwire.peers.current import current_peer
from gradwire.proto.v1 import autograd_pb2
from gradwire.runtime.scope import current_scope, entered
from gradwire.training.modules import RemoteParameters
from gradwire.training.stepping import Rehearsal, unscaled, values_of
from gradwire.transport import Link

__all__ = [
    "Item",
    "LocalPart",
    "ParameterGroup",
    "RemoteCall",
    "RemotePart",
    "Settled",
    "all_of",
    "as_groups",
]

Item = torch.nn.Module | torch.Tensor | Mapping[str, Any]


class ParameterGroup:
    """One parameter group: local tensors and remote modules, each once."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.options = {key: value for key, value in item.items() if key != "params"}
        self.local: dict[torch.Tensor, str] = {}
        """With their names, as far as they have any."""
        self._remote: dict[tuple[int, int], RemoteParameters] = {}
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
            self._remote.setdefault((ref._message.peer.id, ref._message.ref), parameter)
        else:
            self.local.setdefault(parameter, name)

    @property
    def remote(self) -> list[RemoteRef]:
        return [parameters.ref for parameters in self._remote.values()]

    @property
    def shown(self) -> list[torch.Tensor]:
        """The local tensors, and what stands for the parameters of each remote module: a tool of torch that
        goes through the parameters of an optimizer must not pass over those on workers unnoticed."""
        return [*self.local, *self._remote.values()]

    def overlaps(self, other: ParameterGroup) -> bool:
        return bool(self.local.keys() & other.local.keys() or self._remote.keys() & other._remote.keys())


def as_groups(params: Iterable[Item]) -> list[Mapping[str, Any]]:
    """Groups stay as they are; what is in none makes one together."""
    items = [params] if isinstance(params, torch.nn.Module | torch.Tensor | Mapping) else list(params)
    loose = [item for item in items if not isinstance(item, Mapping)]
    groups = [item for item in items if isinstance(item, Mapping)]
    return [*([{"params": loose}] if loose else []), *groups]


class LocalPart:
    """The parameters in this process."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        shown_groups: Sequence[dict[str, Any]],
        defaults: Mapping[str, Any],
        groups: Sequence[ParameterGroup],
    ) -> None:
        make: Callable[..., torch.optim.Optimizer] = optimizer_class
        self._make = partial(make, **defaults)
        self._names: dict[torch.Tensor, str] = {}
        self._shown: list[dict[str, Any]] = []
        self.optimizer: torch.optim.Optimizer | None = None
        both = [(s, g) for s, g in zip(shown_groups, groups, strict=True) if g.local]
        if both:
            self.optimizer = self._make([{**shown, "params": list(group.local)} for shown, group in both])
            self._rehearsal = Rehearsal(self.optimizer)
        for shown, group in both:
            self._note(shown, group)

    def _note(self, shown: dict[str, Any], group: ParameterGroup) -> None:
        self._shown.append(shown)
        self._names.update(group.local)

    def check_new(self, group: ParameterGroup) -> None:
        """Raises what torch raises for tensors that cannot be optimized, or not so."""
        if group.local:
            self._make([{**group.options, "params": list(group.local)}])

    def add(self, shown: dict[str, Any], group: ParameterGroup) -> None:
        """One more group, as it is shown to the user."""
        if not group.local:
            return
        own = {**shown, "params": list(group.local)}
        if self.optimizer is None:
            self.optimizer = self._make([own])
            self._rehearsal = Rehearsal(self.optimizer)
        else:
            self.optimizer.add_param_group(own)
        self._note(shown, group)

    def gradients(self, context: Context | None) -> dict[torch.Tensor, torch.Tensor]:
        """Those of plain backward, or those of a context."""
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
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def unscaled(
        self, gradients: Mapping[torch.Tensor, torch.Tensor], inverse_scale: float
    ) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients without the factor of a GradScaler. `.grad` stays: the step may be refused."""
        try:
            return {p: unscaled(gradient, inverse_scale)[0] for p, gradient in gradients.items()}
        except ValueError as error:
            _refuse("error", str(error))

    def check(self, gradients: Mapping[torch.Tensor, torch.Tensor], skip_nonfinite: bool) -> None:
        """Raises StepRefused if a step could not be made here, before any worker makes one."""
        if self.optimizer is None:
            return
        if skip_nonfinite:
            bad = [p for p, gradient in gradients.items() if not torch.isfinite(values_of(gradient)).all()]
            if bad:
                names = ", ".join(self._names[parameter] for parameter in bad[:5])
                _refuse("nonfinite", f"the gradients of {names} in this process are not finite")
        # Looked up each time: loading a state puts new groups in the place of the old.
        for shown, own in zip(self._shown, self.optimizer.param_groups, strict=True):
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
        with borrowed_grad(self.parameters):
            for parameter in self.parameters:
                parameter.grad = gradients.get(parameter)
            self.optimizer.step()


class RemotePart:
    """The parameters on one worker."""

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
        self._groups = self._parts_of(groups)
        self._ref: RemoteRef | None = None

    def _parts_of(self, groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
        """What there is of groups on this worker. Each group is there, if only with its options."""
        return [
            {"modules": [r for r in group.remote if r.worker._link.peer.id == self.peer], **group.options}
            for group in groups
        ]

    @property
    def modules(self) -> list[RemoteRef]:
        return [ref for group in self._groups for ref in group["modules"]]

    def start_setting_groups(self, groups: Sequence[ParameterGroup]) -> Callable[[], Any]:
        """Has more groups there, or fewer, than so far."""
        # Before it is asked: should the optimizer have to be made anew there, it is made so.
        self._groups = self._parts_of(groups)
        return self.start("set_groups", self._groups)

    @property
    def is_linked(self) -> bool:
        """Whether it can be asked without connecting anew."""
        link = self.worker._place.link
        return link is not None and link.ended is None

    def start_make(self, *, resume: bool) -> Callable[[], Any]:
        """Makes the optimizer there. With `resume`, from what the worker last knew of it."""
        future = self.worker._start(
            "gradwire.optimizer",
            (self._uid, self._class_name, self._defaults, self._groups, resume),
            {},
            keep=autograd_pb2.Keep(),
        )

        def finish() -> None:
            self._ref = calls.wait(future, f"an optimizer on {self.worker.target}")

        return finish

    def start(self, method: str, *args: object, timeout: float | None = None) -> RemoteCall:
        """Starts a call of the optimizer there; what is returned waits for it."""
        return RemoteCall(self, method, args, timeout)

    def look_again(self) -> None:
        """For a worker that was lost, and waited for: raises WorkerLost unless it is back by now."""
        self.worker._place.get(Again.LOST)

    def outcome(self, ticket: int, seconds: float) -> str:
        """What became of a step: made, not made, half made, or unknown. It is not made later, either."""
        self.look_again()
        with entered(replace(current_scope(), deadline=time.monotonic() + seconds)):
            outcome: str = self.start("outcome", ticket)()
        return outcome


class RemoteCall:
    """A call of the optimizer on a worker, under way; calling this waits for it.

    A worker that was restarted has forgotten the optimizer: then it is made again, from the state that the
    worker saved, and asked once more. So it is if the link was lost, but only what may be done twice.
    """

    def __init__(
        self, part: RemotePart, method: str, args: tuple[object, ...], timeout: float | None
    ) -> None:
        self._part = part
        self._method = method
        self._args = args
        self._timeout = timeout
        self.was_sent = False
        """Whether the worker may have got it."""
        self._future: calls.CallFuture | None = None
        self._error: GradwireError | None = None
        self._connecting: Future[Link] | None = None
        if part.is_linked:
            self._send()
        else:
            # Elsewhere, so that several workers that are gone are waited for together.
            self._surroundings = copy_context()
            self._connecting = current_peer().pool.submit(self._surroundings.run, lambda: part.worker._link)

    def _send(self) -> None:
        assert self._part._ref is not None
        try:
            with compression():  # off: state must arrive as it is
                self._future = self._part._ref.call_async(self._method, *self._args, timeout=self._timeout)
            self.was_sent = True
        except GradwireError as error:
            self._error = error

    def __call__(self) -> Any:
        if self._connecting is not None:
            self._connecting.result()
            self._surroundings.run(self._send)
        try:
            if self._future is None:
                assert self._error is not None
                raise self._error
            # Not calls.wait: an interrupt must not cancel a step that others make, too.
            return self._future.result()
        except (NotFound, LinkError) as error:
            if self._method not in _ASKED_AGAIN:
                raise
            if isinstance(error, LinkError):
                if self._method not in _REPEATABLE:
                    raise
                self._part.look_again()
            self.was_sent = False
            self._part.start_make(resume=True)()
            assert self._part._ref is not None
            self.was_sent = True
            with compression():
                return self._part._ref.call(self._method, *self._args)


_REPEATABLE = ("set_groups", "zero_grad", "state_dict", "load_state_dict", "group_sizes", "outcome")
"""What does no harm if it was done already when the link was lost."""
_ASKED_AGAIN = (*_REPEATABLE, "prepare", "step", "sum_of_powers")
"""What an optimizer that was made anew can answer."""


class Settled:
    """Waits for all calls, whatever becomes of each."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.results: list[Any] = []
        self.worked: list[int] = []
        self.failed: list[tuple[int, GradwireError]] = []
        for index, call in enumerate(calls):
            try:
                self.results.append(call())
                self.worked.append(index)
            except GradwireError as error:
                self.failed.append((index, error))


def all_of(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all calls. If some fail, the first error, once none is under way any more."""
    settled = Settled(calls)
    for _, error in settled.failed:
        raise error
    return settled.results


def _refuse(reason: str, message: str) -> NoReturn:
    error = StepRefused(f"the step was not made: {message}")
    error.reason = reason
    raise error
