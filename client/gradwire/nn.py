"""Modules whose parameters live on a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from gradwire._refs import RemoteRef
from gradwire._workers import RemoteWorker, adopt_modules_with

__all__ = ["RemoteModule"]


class RemoteModule(torch.nn.Module):
    """A module on a worker, to be used like one of one's own.

    `worker.create` and `worker.get` give one. Calls run there, and backward flows through them; the
    gradients of its parameters stay there, for `gw.optim.DistributedOptimizer`. Its parameters are not
    among `parameters()`: they are not in this process. Methods of its class can be called as attributes.

    Inside a local module, `train()`, `eval()`, a change of dtype, `state_dict()` and `load_state_dict()` of
    the whole reach it, too. `to(device)` moves it only when called on itself, since the devices are the
    worker's.
    """

    def __init__(self, ref: RemoteRef) -> None:
        super().__init__()
        self.ref = ref

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
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        self._verb("to", device, dtype)
        return self

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
        for key, value in self._verb("state_dict").items():
            destination[prefix + key] = value
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Sends parameters and buffers to the worker."""
        missing, unexpected = self._verb("load_state_dict", dict(state_dict), strict)
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)

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
        missing, unexpected = self._verb("load_state_dict", own, False)
        missing_keys.extend(prefix + key for key in missing)
        if strict:
            unexpected_keys.extend(prefix + key for key in unexpected)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # `fn` says nothing of itself; what it does to numbers of two types shows which type it wants.
        wanted = {fn(torch.zeros((), dtype=dtype)).dtype for dtype in (torch.float32, torch.float64)}
        if len(wanted) == 1:
            self._verb("to", None, wanted.pop())
        return self

    def _verb(self, name: str, *args: object) -> Any:
        return self.ref.worker.call(f"gradwire.module.{name}", self.ref, *args)

    def __gradwire_ref__(self) -> Any:
        return self.ref.__gradwire_ref__()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            ref = self.__dict__.get("ref")
            if ref is not None and name in ref._message.methods:
                return getattr(ref, name)
        return super().__getattr__(name)

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


def _state_dict_arguments(
    *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
) -> tuple[Any, str]:
    if args:
        destination = args[0]
        prefix = args[1] if len(args) > 1 else prefix
    return ({} if destination is None else destination), prefix


adopt_modules_with(RemoteModule)
