"""Who is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """How a contender's processes are made."""

    GRADWIRE = "gradwire"
    TENSORPIPE = "tensorpipe"
    LOCAL = "local"


@dataclass(frozen=True)
class Contender:
    """One way to do the work of a row."""

    name: str
    label: str
    kind: Kind
    same_host: bool = True
    """Whether it may go around the socket between processes of one host."""
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    """What its processes, all of them, are started with."""

    @property
    def polls(self) -> bool:
        """Whether its processes keep a core busy while they wait, as TensorPipe's shared memory does."""
        return self.kind is Kind.TENSORPIPE


GRADWIRE = Contender("gradwire", "gradwire", Kind.GRADWIRE)
GRADWIRE_TCP = Contender("gradwire-tcp", "gradwire, TCP only", Kind.GRADWIRE, same_host=False)
TENSORPIPE = Contender("tensorpipe", "TensorPipe", Kind.TENSORPIPE)
TENSORPIPE_TCP = Contender("tensorpipe-tcp", "TensorPipe, TCP only", Kind.TENSORPIPE, same_host=False)
TENSORPIPE_HUGEPAGES = Contender(
    "tensorpipe-hugepages",
    "TensorPipe, huge-page malloc",
    Kind.TENSORPIPE,
    environment={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
)
LOCAL = Contender("local", "one process", Kind.LOCAL)

CONTENDERS = {
    contender.name: contender
    for contender in (GRADWIRE, GRADWIRE_TCP, TENSORPIPE, TENSORPIPE_TCP, TENSORPIPE_HUGEPAGES, LOCAL)
}
