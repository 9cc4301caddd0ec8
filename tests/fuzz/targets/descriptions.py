"""What a worker says of itself: DescribeResponse and InspectResponse, as a client shows them."""

from __future__ import annotations

from tests.fuzz.inputs import Input
from tests.fuzz.target import Target
from tests.fuzz.targets import serving

from gradwire import wire
from gradwire.api.function_info import function_info
from gradwire.proto.v1 import describe_pb2, link_pb2
from gradwire_server import Worker

__all__ = ["Descriptions"]


class Descriptions(Target):
    name = "descriptions"
    kinds = (describe_pb2.DescribeResponse, describe_pb2.InspectResponse)
    most_parts = 2
    words = ("x", "self", "*", "class", "a b", "1x", "None", "\u202e")

    def corpus(self) -> dict[str, Input]:
        with Worker(serving, name="described") as worker:
            responses = [
                serving.ask(worker, method).body
                for method in (link_pb2.METHOD_DESCRIBE, link_pb2.METHOD_INSPECT)
            ]
        return {"worker": tuple(responses)}

    def run(self, parts: Input) -> object:
        description, inspection, *_ = *parts, b""
        message = wire.parse(describe_pb2.DescribeResponse, description)
        shown = [str(function_info(function)) for function in message.functions]
        wire.parse(describe_pb2.InspectResponse, inspection)
        return shown
