"""What is wrong with a snapshot becomes a CheckpointError, whatever it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradwire.errors import CheckpointError, GradwireError

__all__ = ["reading"]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Reads what a snapshot says. The hashes tell damage by accident; but anybody can write a snapshot whose
    hashes are right, and whose content has any form."""
    try:
        yield
    except GradwireError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, or was not written by gradwire: {type(error).__name__}: {error}"
        ) from error
