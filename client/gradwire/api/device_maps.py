"""Device maps: where tensors go at the other end, and where its results go here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch

from gradwire.errors import InvalidDeviceMap

__all__ = ["Device", "DeviceMap"]

Device = str | int | torch.device


class DeviceMap:
    """Maps this process's devices to a worker's, one to one.

    Arguments go by the map, results by its reverse. Gradients need no map: they go to the device of the
    tensor that they belong to. What the map does not name arrives on the CPU, with a warning.
    """

    def __init__(self, mapping: Mapping[Device, Device]) -> None:
        self._there = {_device(here): _device(there) for here, there in mapping.items()}
        self._here = {there: here for here, there in self._there.items()}
        if len(self._here) < len(self._there):
            raise InvalidDeviceMap("a device map must be one to one, or results would not find back")
        for here in self._there:
            if not _exists(here):
                raise InvalidDeviceMap(f"the device map names {here}, which this process does not have")

    def check(self, devices: Sequence[str], worker: str) -> None:
        """Raises unless a worker with these devices has all that the map names."""
        available = {_device(device) for device in (*devices, "meta")}
        for there in self._here:
            if there not in available:
                raise InvalidDeviceMap(
                    f"the device map names {there}, which {worker} lacks; it has {', '.join(devices)}",
                    worker=worker,
                )

    def places_for(self, tensors: Sequence[torch.Tensor], worker: object) -> list[str]:
        """For each argument, the worker's device to put it on; empty if none needs one."""
        for tensor in tensors:
            if self._there or not tensor.is_cpu:
                break
        else:
            return []
        places = [self._place(tensor.device, self._there, f"on {worker}") for tensor in tensors]
        return [str(place or "") for place in places] if any(places) else []

    def bring_back(self, tensors: list[torch.Tensor], devices: Sequence[str], worker: object) -> None:
        """Puts results where the map says. `devices`: where each was on the worker."""
        for index, device in enumerate(devices):
            if device == "cpu" and not self._here:
                continue
            place = self._place(_device(device), self._here, f"from {worker}")
            if place is not None:
                tensors[index] = move(tensors[index], place)

    def _place(
        self, device: torch.device, mapping: Mapping[torch.device, torch.device], where: str
    ) -> torch.device | None:
        place = mapping.get(device)
        if place is None and device.type not in ("cpu", "meta"):
            warnings.warn(
                f"a tensor on {device} arrives {where} on the CPU; name the device in "
                "gw.connect(device_map=...) to put it elsewhere",
                stacklevel=4,
            )
        return place


def move(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    if tensor.is_meta and place.type != "meta":
        raise InvalidDeviceMap(f"a meta tensor has no data that could be put on {place}")
    return tensor.to(place)


def _device(device: Device) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidDeviceMap(f"{device!r} is no device: {error}") from None
    if parsed.type in ("cpu", "meta"):
        return torch.device(parsed.type)
    # As torch takes it: "cuda" is the current one.
    return torch.device(parsed.type, parsed.index or 0)


def _exists(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    module = getattr(torch, device.type, None)
    count = getattr(module, "device_count", lambda: 0)()
    return device.index is not None and device.index < count


NO_MAP = DeviceMap({})
"""For handles without a map."""
