"""Modules whose parameters live on a worker."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from gradwire.api.contexts import is_explicit
from gradwire.api.refs import RemoteRef
from gradwire.api.workers import RemoteWorker, adopt_modules_with
from gradwire.errors import GradwireError
from gradwire.peers.current import current_context_id
from gradwire.torch_internals import (
    IncompatibleKeys,
    make_subclass,
    parse_to,
    put_parameter,
    set_state_metadata,
    state_metadata,
    unscale_and_check,
)

__all__ = ["RemoteModule"]


class StateWithoutRemoteParts(OrderedDict[str, Any]):
    """A destination for `state_dict()` that only lists remote modules, to be fetched one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.remote_parts: list[tuple[str, RemoteModule]] = []
        """With the prefix of each."""
        set_state_metadata(self, OrderedDict())


class RemoteModule(torch.nn.Module):
    """A module on a worker, to be used like one of one's own.

    `worker.create` and `worker.get` give one. Calls run there, and backward flows through them; the
    gradients of its parameters stay there, for `gw.optim.DistributedOptimizer`. Methods of its class can be
    called as attributes. Among `parameters()` one `RemoteParameters` stands for all that it has: they are
    not in this process.

    Inside a local module, `train()`, `eval()`, `zero_grad()`, `requires_grad_()`, a change of dtype,
    `state_dict()` and `load_state_dict()` of the whole reach it, too. `to(device)` moves it only when called
    on itself, since the devices are the worker's.
    """

    def __init__(self, ref: RemoteRef) -> None:
        super().__init__()
        self.ref = ref
        # Not of this module, but of the ref: a circle would keep the worker's module until Python looks
        # for circles.
        # Under a name that is no attribute, since every attribute might be a method of the class.
        put_parameter(self, "<remote>", RemoteParameters(ref))

    @property
    def worker(self) -> RemoteWorker:
        """Where it lives."""
        return self.ref.worker

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ref(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        self._verb("train", mode)
        return super().train(mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients that its parameters have from this process."""
        self._verb("zero_grad")

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._verb("requires_grad_", requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Moves it to a device of the worker, or to a dtype."""
        device, dtype, _, _ = parse_to(*args, **kwargs)
        self._verb("to", device, dtype)
        return self

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def num_parameters(self, trainable_only: bool = False) -> int:
        """How many numbers its parameters are."""
        count: int = self._verb("num_parameters", trainable_only)
        return count

    def delete(self) -> None:
        """Makes the worker let go of it now."""
        self.ref.delete()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Its parameters and buffers, brought here."""
        destination, prefix = _state_dict_arguments(*args, **kwargs)
        if isinstance(destination, StateWithoutRemoteParts):
            destination.remote_parts.append((prefix, self))
            return destination
        state, metadata = self._verb("state_dict")
        for key, value in state.items():
            destination[prefix + key] = value
        versions = state_metadata(destination)
        if versions is not None:
            for key, value in metadata.items():
                versions[(prefix + key).rstrip(".")] = value
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Sends parameters and buffers to the worker. Raises RuntimeError where they do not fit, as torch
        does. `assign` makes no difference: they are always copied into what is there."""
        metadata = dict(state_metadata(state_dict) or {})
        missing, unexpected, refusal = self._verb("load_state_dict", dict(state_dict), metadata, strict)
        if refusal:
            raise RuntimeError(refusal)
        return IncompatibleKeys(missing, unexpected)

    # -- as a part of a local module, whose own methods go through these

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        metadata = {"": {"version": local_metadata.get("version")}}
        missing, unexpected, refusal = self._verb("load_state_dict", own, metadata, False)
        missing_keys.extend(prefix + key for key in missing)
        if strict:
            unexpected_keys.extend(prefix + key for key in unexpected)
        # The first line names the worker's module; torch will put the name of the whole there.
        for line in refusal.split("\n\t")[1:]:
            error_msgs.append(line.replace("size mismatch for ", f"size mismatch for {prefix}"))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # `fn` says nothing of itself; what it does to numbers of two types shows which type it wants.
        wanted = {fn(torch.zeros((), dtype=dtype)).dtype for dtype in (torch.float32, torch.float64)}
        if len(wanted) == 1:
            self._verb("to", None, wanted.pop())
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """What stands for its parameters; nothing with ``recurse=False``.

        DistributedDataParallel asks so, and would wait for a gradient that never comes to this process.
        """
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def _verb(self, name: str, *args: object) -> Any:
        return _verb(self.ref, name, *args)

    def __gradwire_ref__(self) -> Any:
        return self.ref.__gradwire_ref__()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            ref = self.__dict__.get("ref")
            if ref is not None and name in ref._message.methods:
                return getattr(ref, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            ref = self.__dict__.get("ref")
            if ref is None or name.startswith("_"):
                raise
            raise AttributeError(f"{ref.class_name} on {ref.worker.target} has no method {name!r}") from None

    def __dir__(self) -> list[str]:
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*names, *self.ref._message.methods})

    def __deepcopy__(self, memo: object) -> Self:
        raise TypeError(
            "a remote module cannot be copied: create another one and load the state_dict of this"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a remote module cannot be pickled; save its state_dict, or use gw.save")

    def extra_repr(self) -> str:
        name = f", name={self.ref.name!r}" if self.ref.name else ""
        return f"{self.ref.class_name} on {self.ref.worker.target}{name}"


class RemoteParameters(torch.nn.Parameter):
    """Stands for the parameters of a module on a worker, where torch goes through those of a local one.

    It has no elements. Dropping or zeroing its gradient and setting `requires_grad` happen on the worker.
    An optimizer of torch refuses it, rather than leave the worker's parameters as they are.
    """

    ref: RemoteRef
    _requires_grad: bool

    def __new__(cls, ref: RemoteRef) -> Self:
        made: Self = make_subclass(cls, torch.empty(0), True)
        made.ref = ref
        made._requires_grad = True
        return made

    @property
    def grad(self) -> torch.Tensor | None:
        """Whether there is any is not known here."""
        gradients: _RemoteGradients = make_subclass(_RemoteGradients, torch.empty(0))
        return gradients._of(self.ref)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise TypeError(f"the gradients of {self.ref.class_name} are on {self.ref.worker.target}")
        _verb(self.ref, "zero_grad")

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        _verb(self.ref, "requires_grad_", requires_grad)
        self._requires_grad = requires_grad
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _ALLOWED_ON_PARAMETERS:
            raise TypeError(
                "these parameters are on a worker: what is computed with those of a whole model, such as a "
                "penalty, an average or a copy, would silently be without them. Use a function or a method "
                "on the worker, or the state_dict of the module"
            )
        return _Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        # The first thing that an optimizer of torch asks of a parameter.
        raise TypeError(
            f"the parameters of {self.ref.class_name} are on {self.ref.worker.target}: use "
            "gw.optim.DistributedOptimizer with the module itself"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<parameters of {self.ref!r}>"

    def __deepcopy__(self, memo: object) -> Self:
        raise TypeError("parameters on a worker cannot be copied")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("parameters on a worker cannot be pickled; save the state_dict of the module")


class _RemoteGradients(torch.Tensor):
    """What `grad` of RemoteParameters is: it can be zeroed.

    It has no elements. Whatever else is done with it, such as clipping, would silently leave out the
    gradients on the worker, and so is refused.
    """

    _ref: RemoteRef

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is unscale_and_check:
            return _unscale(*args)
        if func not in _ALLOWED_ON_GRADIENTS:
            raise TypeError(
                "these gradients are on a worker: to clip them, together with those in this process, use "
                "optimizer.clip_grad_norm_ of a gw.optim.DistributedOptimizer"
            )
        return _Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})

    def _of(self, ref: RemoteRef) -> Self:
        self._ref = ref
        return self

    def zero_(self) -> Self:
        _verb(self._ref, "zero_grad")
        return self


_Tensor: Any = torch.Tensor
_ALLOWED_ON_GRADIENTS = (
    *(_Tensor.requires_grad_, _Tensor.detach_, _Tensor.detach),
    *(_Tensor.grad_fn.__get__, _Tensor.__repr__),
    *(_Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.is_sparse.__get__),
)
"""What zero_grad and requires_grad_ of a local module around a remote one need; being shown; and what a
GradScaler asks before it unscales."""


_ALLOWED_ON_PARAMETERS = (
    *(_Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.layout.__get__, _Tensor.shape.__get__),
    *(_Tensor.ndim.__get__, _Tensor.is_sparse.__get__, _Tensor.is_cuda.__get__, _Tensor.is_meta.__get__),
    *(_Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.is_floating_point, _Tensor.is_complex),
    _Tensor.detach,
)
"""What it is like, but not what it holds. DistributedDataParallel detaches all parameters to send them to the
other processes, and this one has no elements to send; what was detached refuses the rest as well."""


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """What a GradScaler does to the gradients of an optimizer, here and on workers."""
    if is_explicit(current_context_id()):
        raise TypeError(
            "a GradScaler works on the gradients of plain backward(): use scaler.scale(loss).backward() "
            "outside of contexts"
        )
    remote: dict[int, list[RemoteRef]] = {}
    for gradient in gradients:
        if isinstance(gradient, _RemoteGradients):
            # Twice the same would be unscaled twice, if asked for apart from each other.
            remote.setdefault(gradient._ref.worker._link.peer.id, []).append(gradient._ref)
    factor = float(inverse_scale)
    calls = [refs[0].worker.call_async("gradwire.unscale", refs, factor) for refs in remote.values()]
    local = [gradient for gradient in gradients if not isinstance(gradient, _RemoteGradients)]
    if local:
        unscale_and_check(local, found_inf, inverse_scale)
    # All are waited for, whatever becomes of each.
    failure = next((failed for call in calls if (failed := call.exception()) is not None), None)
    if failure is not None:
        # Some gradients have the factor and some have not. A GradScaler that tries again finds that they are
        # not finite, and skips the step.
        for gradient in local:
            gradient.mul_(math.nan)
        for call, refs in zip(calls, remote.values(), strict=True):
            if call.exception() is None:
                with contextlib.suppress(GradwireError):
                    refs[0].worker.call("gradwire.unscale", refs, math.nan)
        raise failure
    if any(call.result() for call in calls):
        found_inf.fill_(1.0)


def _verb(ref: RemoteRef, name: str, *args: object) -> Any:
    return ref.worker.call(f"gradwire.module.{name}", ref, *args)


def _state_dict_arguments(
    *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
) -> tuple[Any, str]:
    if args:
        destination = args[0]
        prefix = args[1] if len(args) > 1 else prefix
    if destination is None:
        destination = OrderedDict()
        set_state_metadata(destination, OrderedDict())
    return destination, prefix


adopt_modules_with(RemoteModule)
