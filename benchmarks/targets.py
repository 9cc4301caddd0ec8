"""What gradwire is to achieve."""

from __future__ import annotations

from benchmarks.contenders import Carrier

Target = float | None
"""None: there for information."""

TARGETS: dict[str, tuple[Target, Target, Target]] = {
    "1": (0.3, 0.3, 0.8),
    "2": (0.5, 0.5, 0.8),
    "3": (0.6, 0.6, 0.8),
    "4": (0.25, 0.3, 0.5),
    "5": (0.4, 0.4, 0.5),
    "5-in-flight": (0.4, 0.4, 0.5),
    **{
        f"{row}-{size}": targets
        for row in (6, 7)
        for size, targets in {
            "64KB": (0.6, 0.6, 1.0),
            "256KB": (0.6, 0.6, 1.0),
            "1MB": (0.6, 0.6, 1.3),
            "16MB": (0.4, 0.8, 1.5),
            "64MB": (0.4, 0.8, 1.0),
            "256MB": (0.4, 0.8, 0.9),
        }.items()
    },
    "8": (0.5, 0.5, 0.8),
    "9": (0.6, 0.6, 0.8),
    "10": (1.05, None, None),
    "11-busy": (2.0, 5.0, 5.0),
    "12-one-way": (0.6, 0.3, 1.1),
    "12-echo": (0.6, 0.3, 1.1),
    **{
        f"13-{kind}-{tensors}": (0.7, 0.7, None)
        for kind in ("echo", "backward")
        for tensors in ("100x4KB", "20x256KB")
    },
}
"""By case: on the same host, over TCP with a socket of gradwire's own, and over gRPC streams alone. Ratios to
TensorPipe's time over the same; row 10 to one process, row 11 to itself, row 12 to the bytes that cross."""

HUGEPAGES_TARGET = 1.0
"""Against TensorPipe with huge-page malloc, on the same host."""


def target_of(key: str, carrier: Carrier) -> Target:
    """The target of a case over a carrier."""
    return TARGETS.get(key, (None, None, None))[list(Carrier).index(carrier)]
