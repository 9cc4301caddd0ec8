"""What a receiver is ready to take. Everything here is checked before memory is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_DEPTH", "Limits"]

MAX_DEPTH = 32
"""Levels of nesting that the protocol allows: a number is 1 level, a list of numbers 2.

protobuf parsers stop at 100 nested messages. A dict or record costs three messages a level and a leaf one,
so 32 levels cost 94 at most and leave six for the messages that a value travels in.
"""


@dataclass(frozen=True)
class Limits:
    """Bounds on what one message may hold. The bytes themselves are bounded by the transport."""

    max_depth: int = MAX_DEPTH
    """Levels of nesting of a value: a number is 1 level, a list of numbers 2."""

    max_tensors: int = 65_536
    """Tensors in one message, components of sparse ones included."""

    max_dims: int = 64
    """Dimensions of one tensor or array."""

    max_tensor_elements: int = 2**28
    """Elements that one tensor may span without that their bytes came. An expanded (stride 0), sparse or meta
    tensor costs its sender nothing, but whoever computes with it may need memory for all that it spans."""
