"""How tensors are compressed on the wire: chosen for a handle to a worker, or for the calls of a block."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire import wire
from gradwire.errors import CodecUnavailable
from gradwire.transport.base import Link

__all__ = ["NOT_COMPRESSED", "Compression"]


@dataclass(frozen=True, slots=True)
class Compression:
    """The codecs for tensors on the wire: "fp16", "bf16", "int8", "zstd", or None for uncompressed.

    `forward` is for the arguments and results of calls, `backward` for gradients in both directions. With
    "int8" and `error_feedback`, the rounding error of a gradient is added to the next gradient of the same
    call site.

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
        """Raises CodecUnavailable if the other end of a link lacks one of the two codecs."""
        for name in (self.forward, self.backward):
            if name is not None and wire.CODECS[name] not in link.peer_codecs:
                raise CodecUnavailable(
                    f"{link.peer} does not take codec {name!r}: it lacks the package that "
                    f"'gradwire[{name}]' would install, or is an older gradwire",
                    worker=str(link.peer),
                )


NOT_COMPRESSED = Compression()
