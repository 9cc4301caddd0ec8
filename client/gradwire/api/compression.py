"""How the tensors of a call are compressed: chosen for a block, and written into the call's request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradwire import wire
from gradwire.proto.v1 import autograd_pb2, value_pb2
from gradwire.runtime.compression import Compression
from gradwire.runtime.scope import current_scope, entered
from gradwire.transport import Link

__all__ = ["compression", "compression_message"]


@contextmanager
def compression(
    forward: str | None = None, backward: str | None = None, *, error_feedback: bool = True
) -> Iterator[None]:
    """Compresses the tensors of all calls made in a block, and the gradients that flow back through them
    later.

    Takes the place of the compression of the handles. ``gw.compression()`` switches compression off.

    >>> import gradwire as gw
    >>> with gw.compression(backward="int8"):
    ...     pass  # calls
    """
    chosen = Compression(forward, backward, error_feedback)
    with entered(current_scope()._replace(compression=chosen)):
        yield


def compression_message(
    link: Link, chosen: Compression, function: str, target: value_pb2.RemoteRef | None
) -> autograd_pb2.Compression | None:
    """The compression field of the request of a call; None if nothing is to be compressed.

    Raises CodecUnavailable if the other end of the link lacks a codec.
    """
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
