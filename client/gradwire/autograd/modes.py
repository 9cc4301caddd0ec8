"""The caller's modes, which travel with a call: grad mode, inference mode, autocast, anomaly detection."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import torch

from gradwire.proto.v1 import autograd_pb2
from gradwire.runtime.scope import Scope
from gradwire.torch_internals import is_any_autocast_enabled, set_grad_enabled

__all__ = ["anomaly_is_wanted", "applied", "capture", "detecting_anomaly"]

_DEVICE_TYPES = ("cpu", "cuda")
_anomaly_lock = threading.Lock()
_anomaly_users = 0
_anomaly_before = False


def anomaly_is_wanted(scope: Scope) -> bool:
    """Whether code in a scope wants anomaly detection.

    torch's own switch is for the whole process: on a worker another client may have turned it on.
    """
    wanted = scope.detect_anomaly
    return torch.is_anomaly_enabled() if wanted is None else wanted


class detecting_anomaly:
    """Runs a block with anomaly detection, if the caller wants it."""

    __slots__ = ("_wanted",)

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        global _anomaly_users, _anomaly_before
        if self._wanted:
            # Blocks are counted: of two that overlap, the first to end must neither turn anomaly detection
            # off for the second nor leave it on for ever.
            with _anomaly_lock:
                if not _anomaly_users:
                    _anomaly_before = torch.is_anomaly_enabled()
                    torch.autograd.set_detect_anomaly(True)
                _anomaly_users += 1

    def __exit__(self, *_: object) -> None:
        global _anomaly_users
        if self._wanted:
            with _anomaly_lock:
                _anomaly_users -= 1
                if not _anomaly_users:
                    torch.autograd.set_detect_anomaly(_anomaly_before)


def capture(scope: Scope) -> autograd_pb2.Modes | None:
    """The modes of this thread, which is in that scope; None if all are torch's defaults."""
    no_grad = not torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()  # also within enable_grad, where no_grad is False
    anomaly = anomaly_is_wanted(scope)
    if not (no_grad or inference or anomaly or is_any_autocast_enabled()):  # every field of Modes
        return None
    autocast = [
        autograd_pb2.Autocast(
            device_type=device_type,
            enabled=True,
            dtype=str(torch.get_autocast_dtype(device_type)).removeprefix("torch."),
        )
        for device_type in _DEVICE_TYPES
        if torch.is_autocast_enabled(device_type)
    ]
    return autograd_pb2.Modes(
        no_grad=no_grad,
        inference=inference,
        autocast=autocast,
        detect_anomaly=anomaly,
    )


class applied:
    """Runs a block under the modes of a caller."""

    __slots__ = ("_before", "_modes", "_stack")

    def __init__(self, modes: autograd_pb2.Modes) -> None:
        self._modes = modes

    def __enter__(self) -> None:
        # Set even if it is the default: an earlier function may have left this thread in another mode.
        self._before = torch.is_grad_enabled()
        set_grad_enabled(not self._modes.no_grad)
        self._stack: ExitStack | None = None
        if self._modes.ByteSize():
            self._stack = ExitStack()
            self._enter_unusual(self._stack)

    def _enter_unusual(self, stack: ExitStack) -> None:
        if self._modes.inference:
            stack.enter_context(torch.inference_mode())
        for autocast in self._modes.autocast:
            dtype = getattr(torch, autocast.dtype, None)
            if isinstance(dtype, torch.dtype) and autocast.device_type in _DEVICE_TYPES:
                stack.enter_context(
                    torch.autocast(autocast.device_type, dtype=dtype, enabled=autocast.enabled)
                )
        stack.enter_context(detecting_anomaly(self._modes.detect_anomaly))

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*error)
        set_grad_enabled(self._before)
