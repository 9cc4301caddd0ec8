"""The caller's modes, which travel with a call: grad mode, inference mode, autocast, anomaly detection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from gradwire.proto.v1 import autograd_pb2

__all__ = ["applied", "capture"]

_DEVICE_TYPES = ("cpu", "cuda")


def capture() -> autograd_pb2.Modes | None:
    """What differs from torch's defaults here and now; None if nothing does."""
    autocast = [
        autograd_pb2.Autocast(
            device_type=device_type,
            enabled=True,
            dtype=str(torch.get_autocast_dtype(device_type)).removeprefix("torch."),
        )
        for device_type in _DEVICE_TYPES
        if torch.is_autocast_enabled(device_type)
    ]
    no_grad = not torch.is_grad_enabled()
    anomaly = torch.is_anomaly_enabled()
    if not (autocast or no_grad or anomaly):
        return None
    return autograd_pb2.Modes(
        no_grad=no_grad,
        inference=torch.is_inference_mode_enabled(),
        autocast=autocast,
        detect_anomaly=anomaly,
    )


@contextmanager
def applied(modes: autograd_pb2.Modes) -> Iterator[None]:
    """Runs a block under the modes of a caller."""
    with ExitStack() as stack:
        if modes.inference:
            stack.enter_context(torch.inference_mode())
        elif modes.no_grad:
            stack.enter_context(torch.no_grad())
        for autocast in modes.autocast:
            dtype = getattr(torch, autocast.dtype, None)
            if isinstance(dtype, torch.dtype) and autocast.device_type in _DEVICE_TYPES:
                stack.enter_context(
                    torch.autocast(autocast.device_type, dtype=dtype, enabled=autocast.enabled)
                )
        if modes.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        yield
