"""Handles to modules whose parameters live on a worker."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from gradwire.api.contexts import is_explicit
from gradwire.api.refs import RemoteRef, message_of
from gradwire.api.workers import RemoteWorker, link_of, set_module_handle
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

__all__ = ["LocalStateDict", "RemoteModule", "RemoteParameters"]


class LocalStateDict(OrderedDict[str, Any]):
    """A destination for `state_dict()` that takes the local state only.

    It lists the remote modules instead of fetching their states, so that they can be fetched one at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.remote_modules: list[tuple[str, RemoteModule]] = []
        """The remote modules, each with the prefix of its keys."""
        set_state_metadata(self, OrderedDict())


class RemoteModule(torch.nn.Module):
    """A module on a worker, used like a local module.

    `worker.create` and `worker.get` return one. Calls run on the worker, and backward flows through them. The
    gradients of the parameters stay on the worker, for `gw.optim.DistributedOptimizer`. Methods of the
    module's class can be called as attributes. `parameters()` yields one `RemoteParameters`, which stands for
    all parameters of the module: they are not in this process.

    Inside a local module, the local module's `train()`, `eval()`, `zero_grad()`, `requires_grad_()`, changes
    of dtype, `state_dict()` and `load_state_dict()` include the remote module. `to(device)` moves a remote
    module only if it is called on the remote module itself, since the devices are the worker's.
    """

    def __init__(self, ref: RemoteRef) -> None:
        super().__init__()
        self.ref = ref
        # RemoteParameters refers to the ref and not to this module: a reference cycle would keep the worker's
        # module alive until a garbage collection. "<remote>" cannot be an attribute, and any valid attribute
        # name might be a method of the module's class.
        put_parameter(self, "<remote>", RemoteParameters(ref))

    @property
    def worker(self) -> RemoteWorker:
        """The worker that holds the module."""
        return self.ref.worker

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ref(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        self._call_builtin("train", mode)
        return super().train(mode)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that this process's backwards have given the parameters."""
        self._call_builtin("zero_grad")

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._call_builtin("requires_grad_", requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Moves the module to a device of the worker, or converts it to a dtype."""
        device, dtype, _, _ = parse_to(*args, **kwargs)
        self._call_builtin("to", device, dtype)
        return self

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> Self:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def num_parameters(self, trainable_only: bool = False) -> int:
        """How many elements the module's parameters have in total."""
        count: int = self._call_builtin("num_parameters", trainable_only)
        return count

    def delete(self) -> None:
        """Makes the worker drop the module now."""
        self.ref.delete()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's parameters and buffers, copied to this process."""
        destination, prefix = _state_dict_arguments(*args, **kwargs)
        if isinstance(destination, LocalStateDict):
            destination.remote_modules.append((prefix, self))
            return destination
        state, metadata = self._call_builtin("state_dict")
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
        """Sends parameters and buffers to the worker. Raises RuntimeError if they do not fit, as torch does.

        `assign` has no effect: values are always copied into the worker's parameters and buffers.
        """
        metadata = dict(state_metadata(state_dict) or {})
        missing, unexpected, refusal = self._call_builtin(
            "load_state_dict", dict(state_dict), metadata, strict
        )
        if refusal:
            raise RuntimeError(refusal)
        return IncompatibleKeys(missing, unexpected)

    # -- inside a local module: torch's methods of the local module call these

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
        missing, unexpected, refusal = self._call_builtin("load_state_dict", own, metadata, False)
        missing_keys.extend(prefix + key for key in missing)
        if strict:
            unexpected_keys.extend(prefix + key for key in unexpected)
        # The first line names the worker's module; torch writes a first line with the local module's name.
        for line in refusal.split("\n\t")[1:]:
            error_msgs.append(line.replace("size mismatch for ", f"size mismatch for {prefix}"))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Only calling `fn` shows what it does. If it makes the same dtype of tensors of two dtypes, it
        # converts tensors to that dtype.
        wanted = {fn(torch.zeros((), dtype=dtype)).dtype for dtype in (torch.float32, torch.float64)}
        if len(wanted) == 1:
            self._call_builtin("to", None, wanted.pop())
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The `RemoteParameters` of the module; nothing with ``recurse=False``.

        DistributedDataParallel passes ``recurse=False``, and would wait for a gradient of each parameter that
        it finds: the gradients on the worker never come to this process.
        """
        if recurse:
            yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def _call_builtin(self, name: str, *args: object) -> Any:
        return _call_builtin(self.ref, name, *args)

    def __gradwire_ref__(self) -> Any:
        return self.ref.__gradwire_ref__()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            ref = self.__dict__.get("ref")
            if ref is not None and name in message_of(ref).methods:
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
        return sorted({*names, *message_of(self.ref).methods})

    def __deepcopy__(self, memo: object) -> Self:
        raise TypeError(
            "a remote module cannot be copied: create another module and load the state_dict of this module"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a remote module cannot be pickled; save its state_dict, or use gw.save")

    def extra_repr(self) -> str:
        name = f", name={self.ref.name!r}" if self.ref.name else ""
        return f"{self.ref.class_name} on {self.ref.worker.target}{name}"


class RemoteParameters(torch.nn.Parameter):
    """Stands for all parameters of a module on a worker, where torch iterates over a module's parameters.

    It has no elements. Dropping or zeroing its gradient and setting `requires_grad` take effect on the
    worker. An optimizer of torch raises for it: otherwise the worker's parameters would silently not be
    optimized.
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
        """A tensor that stands for the gradients on the worker. It is never None: whether the worker has
        gradients is not known here."""
        gradients: _RemoteGradients = make_subclass(_RemoteGradients, torch.empty(0))
        return gradients._with_ref(self.ref)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            raise TypeError(f"the gradients of {self.ref.class_name} are on {self.ref.worker.target}")
        _call_builtin(self.ref, "zero_grad")

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        _call_builtin(self.ref, "requires_grad_", requires_grad)
        self._requires_grad = requires_grad
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _ALLOWED_ON_PARAMETERS:
            raise TypeError(
                "these parameters are on a worker: what is computed from all parameters of a model, such as "
                "a penalty, an average or a copy, would silently leave them out. Use a function or a method "
                "on the worker, or the state_dict of the module"
            )
        return _Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        # An optimizer of torch reads `is_leaf` of each parameter first, so this refuses it.
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
    """The `grad` of RemoteParameters, which stands for the gradients on the worker and can be zeroed.

    It has no elements. Other operations, such as clipping, would silently leave out the gradients on the
    worker, and so raise.
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

    def _with_ref(self, ref: RemoteRef) -> Self:
        self._ref = ref
        return self

    def zero_(self) -> Self:
        _call_builtin(self._ref, "zero_grad")
        return self


_Tensor: Any = torch.Tensor
_ALLOWED_ON_GRADIENTS = (
    *(_Tensor.requires_grad_, _Tensor.detach_, _Tensor.detach),
    *(_Tensor.grad_fn.__get__, _Tensor.__repr__),
    *(_Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.is_sparse.__get__),
)
"""What `zero_grad` and `requires_grad_` of a local module around a remote module use, what `repr` uses, and
what a GradScaler reads before it unscales."""


_ALLOWED_ON_PARAMETERS = (
    *(_Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.layout.__get__, _Tensor.shape.__get__),
    *(_Tensor.ndim.__get__, _Tensor.is_sparse.__get__, _Tensor.is_cuda.__get__, _Tensor.is_meta.__get__),
    *(_Tensor.size, _Tensor.dim, _Tensor.numel, _Tensor.is_floating_point, _Tensor.is_complex),
    _Tensor.detach,
)
"""What describes a parameter, but does not read its elements. `detach` is allowed because
DistributedDataParallel detaches all parameters to send them to its other processes: `RemoteParameters` has no
elements to send, and the detached tensor refuses the other operations as well."""


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Unscales the gradients of an optimizer in place, here and on workers, as a GradScaler does."""
    if is_explicit(current_context_id()):
        raise TypeError(
            "a GradScaler works on the gradients of plain backward(): use scaler.scale(loss).backward() "
            "outside of contexts"
        )
    remote: dict[int, list[RemoteRef]] = {}
    for gradient in gradients:
        if isinstance(gradient, _RemoteGradients):
            # One call for each worker: in separate calls the worker would unscale a shared parameter twice.
            remote.setdefault(link_of(gradient._ref.worker).peer.id, []).append(gradient._ref)
    factor = float(inverse_scale)
    calls = [refs[0].worker.call_async("gradwire.unscale", refs, factor) for refs in remote.values()]
    local = [gradient for gradient in gradients if not isinstance(gradient, _RemoteGradients)]
    if local:
        unscale_and_check(local, found_inf, inverse_scale)
    # All calls are waited for, even if one fails.
    failure = next((failed for call in calls if (failed := call.exception()) is not None), None)
    if failure is not None:
        # Some gradients are unscaled now and some are not. All are set to NaN, so that a GradScaler that
        # tries again skips the step.
        for gradient in local:
            gradient.mul_(math.nan)
        for call, refs in zip(calls, remote.values(), strict=True):
            if call.exception() is None:
                with contextlib.suppress(GradwireError):
                    refs[0].worker.call("gradwire.unscale", refs, math.nan)
        raise failure
    if any(call.result() for call in calls):
        found_inf.fill_(1.0)


def _call_builtin(ref: RemoteRef, name: str, *args: object) -> Any:
    """Calls one of the worker's built-in functions for modules."""
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


set_module_handle(RemoteModule)
