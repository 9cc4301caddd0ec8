"""How tensors are compressed on their way: chosen for a handle to a worker, or for the calls of a block."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire import wire
from gradwire.errors import CodecUnavailable
from gradwire.transport.base import Link

__all__ = ["NOT_COMPRESSED", "Compression"]


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
