"""Device maps: the worker's devices that arguments go to, and the devices here that results go to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from gradwire.errors import InvalidDeviceMap

__all__ = ["NO_MAP", "Device", "DeviceMap"]

Device = str | int | torch.device


class DeviceMap:
    """Maps this process's devices to a worker's, one to one.

    Arguments go by the map, results by its reverse. Gradients need no map: they go to the device of the
    tensor that they belong to. Tensors on devices that the map does not name arrive on the CPU, with a
    warning.
    """

    def __init__(self, mapping: Mapping[Device, Device]) -> None:
        self._there = {_device(here): _device(there) for here, there in mapping.items()}
        self._here = {there: here for here, there in self._there.items()}
        if len(self._here) < len(self._there):
            raise InvalidDeviceMap(
                "a device map must be one to one, or the device of a result would be ambiguous"
            )
        for here in self._there:
            if not _exists(here):
                raise InvalidDeviceMap(f"the device map names {here}, which this process does not have")

    def check(self, devices: Sequence[str], worker: str) -> None:
        """Raises InvalidDeviceMap if the map names a device that is not among these devices of the worker."""
        available = {_device(device) for device in (*devices, "meta")}
        for there in self._here:
            if there not in available:
                raise InvalidDeviceMap(
                    f"the device map names {there}, which {worker} lacks; it has {', '.join(devices)}",
                    worker=worker,
                )

    def target_devices(self, tensors: Sequence[torch.Tensor], worker: object) -> list[str]:
        """The worker's device for each argument, "" for the CPU; an empty list if all go to the CPU."""
        for tensor in tensors:
            if self._there or not tensor.is_cpu:
                break
        else:
            return []
        targets = [self._lookup(tensor.device, self._there, f"on {worker}") for tensor in tensors]
        return [str(target or "") for target in targets] if any(targets) else []

    def move_results(self, tensors: list[torch.Tensor], devices: Sequence[str], worker: object) -> None:
        """Moves results to the devices that the reverse map names. `devices`: their devices on the worker."""
        for index, device in enumerate(devices):
            if device == "cpu" and not self._here:
                continue
            target = self._lookup(_device(device), self._here, f"from {worker}")
            if target is not None:
                tensors[index] = move(tensors[index], target)

    def _lookup(
        self, device: torch.device, mapping: Mapping[torch.device, torch.device], where: str
    ) -> torch.device | None:
        target = mapping.get(device)
        if target is None and device.type not in ("cpu", "meta"):
            warnings.warn(
                f"a tensor on {device} arrives {where} on the CPU; name the device in "
                "gw.connect(device_map=...) to put it elsewhere",
                stacklevel=4,
            )
        return target


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on another device. Raises InvalidDeviceMap for a meta tensor, which has no elements to
    move."""
    if tensor.is_meta and device.type != "meta":
        raise InvalidDeviceMap(f"a meta tensor has no data that could be put on {device}")
    return tensor.to(device)


def _device(device: Device) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidDeviceMap(f"{device!r} is no device: {error}") from None
    if parsed.type in ("cpu", "meta"):
        return torch.device(parsed.type)
    # A device without an index, such as "cuda", is the first of its kind.
    return torch.device(parsed.type, parsed.index or 0)


def _exists(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    module = getattr(torch, device.type, None)
    count = getattr(module, "device_count", lambda: 0)()
    return device.index is not None and device.index < count


NO_MAP = DeviceMap({})
"""The device map of a handle that was made without a device map."""
