"""Who is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """How a contender's processes are made."""

    GRADWIRE = "gradwire"
    TENSORPIPE = "tensorpipe"
    LOCAL = "local"


class Carrier(Enum):
    """The best that may carry the bytes between the processes."""

    SAME_HOST = "same host"
    """What goes around the network: local sockets and shared memory."""
    TCP = "TCP only"
    """Sockets of its own over the network."""
    GRPC = "gRPC streams only"
    """What is left of gradwire where no socket of its own is possible, as with TLS."""


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a row."""

    name: str
    label: str
    kind: Kind
    carrier: Carrier = Carrier.SAME_HOST
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    """What its processes, all of them, are started with."""

    @property
    def polls(self) -> bool:
        """Whether its processes keep a core busy while they wait, as TensorPipe's shared memory does."""
        return self.kind is Kind.TENSORPIPE


GRADWIRE = Contender("gradwire", "gradwire", Kind.GRADWIRE)
GRADWIRE_TCP = Contender("gradwire-tcp", "gradwire, TCP only", Kind.GRADWIRE, Carrier.TCP)
GRADWIRE_GRPC = Contender("gradwire-grpc", "gradwire, gRPC only", Kind.GRADWIRE, Carrier.GRPC)
TENSORPIPE = Contender("tensorpipe", "TensorPipe", Kind.TENSORPIPE)
TENSORPIPE_TCP = Contender("tensorpipe-tcp", "TensorPipe, TCP only", Kind.TENSORPIPE, Carrier.TCP)
TENSORPIPE_HUGEPAGES = Contender(
    "tensorpipe-hugepages",
    "TensorPipe, huge-page malloc",
    Kind.TENSORPIPE,
    environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
)
LOCAL = Contender("local", "one process", Kind.LOCAL)

CONTENDERS = {
    contender.name: contender
    for contender in (
        GRADWIRE,
        GRADWIRE_TCP,
        GRADWIRE_GRPC,
        TENSORPIPE,
        TENSORPIPE_TCP,
        TENSORPIPE_HUGEPAGES,
        LOCAL,
    )
}
