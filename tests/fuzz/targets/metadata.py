"""What messages say of autograd: in full, in short, and contexts as text."""

from __future__ import annotations

from tests.fuzz.inputs import Input
from tests.fuzz.target import Target
from tests.fuzz.targets.plans import _metadata

from gradwire import wire
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.proto.v1 import autograd_pb2
from gradwire.wire.ids import AutogradMessageId, ContextId

__all__ = ["Metadata"]


class Metadata(Target):
    name = "metadata"
    kinds = (autograd_pb2.AutogradMetadata, None)
    most_parts = 3

    def corpus(self) -> dict[str, Input]:
        metadata = _metadata()
        message = autograd_pb2.AutogradMetadata()
        metadata.write(message)
        released = [AutogradMessageId(7, number, 8) for number in range(3)]
        text = str(ContextId(5, 3, 8)).encode()
        return {
            "all": (message.SerializeToString(), metadata.in_short(released), text),
            "plain": (b"", AutogradMetadata(ContextId(1, 2, 8)).in_short(()), text),
        }

    def run(self, parts: Input) -> object:
        full, short, text, *_ = *parts, b"", b""
        parsed = AutogradMetadata.parse(wire.parse(autograd_pb2.AutogradMetadata, full))
        parsed.write(autograd_pb2.AutogradMetadata())
        parsed.in_short(())
        try:
            str(ContextId.from_text(text.decode("utf-8", "replace")))
        except ValueError:
            pass  # as documented
        metadata, released, end = AutogradMetadata.from_short(short, 0)
        assert end <= len(short)
        assert metadata.in_short(released)[: end - 1]
        return metadata
