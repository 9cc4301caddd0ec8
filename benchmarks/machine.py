"""What the measurements were made on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import grpc
import torch

import gradwire as gw


def facts() -> dict[str, object]:
    """The machine and the versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "processor": _first("/proc/cpuinfo", "model name"),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "huge_pages": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
        "load": list(os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "grpcio": grpc.__version__,
        "gradwire": gw.__version__,
    }


def _first(path: str, field: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return "unknown"
