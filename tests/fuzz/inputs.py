"""Inputs of targets, and the corpora in which they are kept."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CORPUS", "Input", "join", "load_corpus", "split", "write_corpus"]

Input = tuple[bytes, ...]
"""The parts of an input: what they are, its target says."""

CORPUS = Path(__file__).parent / "corpus"


def join(parts: Input) -> bytes:
    """An input as the content of a file: each part after its length in four bytes."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def split(content: bytes) -> Input:
    """The input in a file. Any bytes are one: the last part is as long as it says, or to the end."""
    parts = []
    at = 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "little")
        parts.append(content[at + 4 : at + 4 + size])
        at += 4 + size
    return tuple(parts) or (b"",)


def load_corpus(target: str) -> list[Input]:
    """The corpus of a target, in an order that does not change."""
    return [split(path.read_bytes()) for path in sorted((CORPUS / target).glob("*.bin"))]


def write_corpus(target: str, inputs: dict[str, Input]) -> None:
    """Replaces the corpus of a target."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.bin"):
        old.unlink()
    for name, parts in inputs.items():
        (folder / f"{name}.bin").write_bytes(join(parts))
