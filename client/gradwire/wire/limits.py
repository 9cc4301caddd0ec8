"""The limits of a receiver. All are checked before memory is allocated."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_DEPTH", "Limits"]

MAX_DEPTH = 32
"""Levels of nesting that the protocol allows: a number is 1 level, a list of numbers 2.

Protobuf parsers stop at 100 nested messages. A dict or record takes three messages for a level, and a leaf
takes one, so 32 levels take at most 94, which leaves six for the messages around a value.
"""


@dataclass(frozen=True)
class Limits:
    """Bounds on what one message may hold. The bytes themselves are bounded by the transport."""

    max_depth: int = MAX_DEPTH
    """Levels of nesting of a value: a number is 1 level, a list of numbers 2."""

    max_tensors: int = 65_536
    """Tensors in one message, including the components of sparse tensors."""

    max_dims: int = 64
    """Dimensions of one tensor or array."""

    max_tensor_elements: int = 2**28
    """Elements of one tensor whose bytes were not all received. An expanded (stride 0), sparse or meta tensor
    costs its sender nothing, but a computation with it may need memory for all its elements."""
