"""How tensors are compressed on their way: chosen for a handle to a worker, or for the calls of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gradwire import wire
from gradwire._scope import current_scope, entered
from gradwire.errors import CodecUnavailable
from gradwire.proto.v1 import autograd_pb2, value_pb2
from gradwire.transport import Link

__all__ = ["NOT_COMPRESSED", "Compression", "agreed_with", "compression"]


@dataclass(frozen=True, slots=True)
class Compression:
    """How tensors travel: ``None`` as they are, or "fp16", "bf16", "int8" or "zstd".

    `forward` is for the arguments and results of calls, `backward` for gradients, both ways. With "int8",
    what rounding leaves out of one gradient is added to the next one of the same place (`error_feedback`).

    >>> import gradwire as gw
    >>> gw.Compression(forward="bf16", backward="int8")
    Compression(forward='bf16', backward='int8', error_feedback=True)
    """

    forward: str | None = None
    backward: str | None = None
    error_feedback: bool = True

    def __post_init__(self) -> None:
        for name in (self.forward, self.backward):
            if name is not None:
                wire.require_codec(name)

    def check(self, link: Link) -> None:
        """Raises CodecUnavailable if the other end of a link lacks one of the codecs."""
        for name in (self.forward, self.backward):
            if name is not None and wire.CODECS[name] not in link.peer_codecs:
                raise CodecUnavailable(
                    f"{link.peer} does not take codec {name!r}: it lacks the package that "
                    f"'gradwire[{name}]' would install, or is an older gradwire",
                    worker=str(link.peer),
                )


NOT_COMPRESSED = Compression()


@contextmanager
def compression(
    forward: str | None = None, backward: str | None = None, *, error_feedback: bool = True
) -> Iterator[None]:
    """Compresses the tensors of all calls made in a block, whatever their handles say, and the gradients that
    flow back through them later. ``gw.compression()`` switches it off.

    >>> import gradwire as gw
    >>> with gw.compression(backward="int8"):
    ...     pass  # calls
    """
    chosen = Compression(forward, backward, error_feedback)
    with entered(replace(current_scope(), compression=chosen)):
        yield


def agreed_with(
    link: Link, chosen: Compression, function: str, target: value_pb2.RemoteRef | None
) -> autograd_pb2.Compression | None:
    """What a call over a link says of compression; None if nothing is to be compressed."""
    if chosen.forward is None and chosen.backward is None:
        return None
    chosen.check(link)
    message = autograd_pb2.Compression(error_feedback=chosen.error_feedback)
    if chosen.forward is not None:
        message.forward = wire.CODECS[chosen.forward]
    if chosen.backward is not None:
        message.backward = wire.CODECS[chosen.backward]
    message.site = hash((function, 0 if target is None else target.ref)) & (2**64 - 1)
    return message
