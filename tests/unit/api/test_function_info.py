"""What a worker says of its functions is checked before it becomes a signature."""

from __future__ import annotations

import pytest

from gradwire.api.function_info import function_info
from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import describe_pb2

Parameter = describe_pb2.Parameter


@pytest.mark.parametrize(
    "parameters",
    [
        [Parameter(name="1x", kind=Parameter.KIND_KEYWORD_ONLY)],
        [Parameter(name="class", kind=Parameter.KIND_KEYWORD_ONLY)],
        [Parameter(name="", kind=Parameter.KIND_KEYWORD_ONLY)],
        [Parameter(name="x")],
        [Parameter(name="x", kind=77)],  # type: ignore[arg-type]
        [Parameter(name="x", kind=Parameter.KIND_KEYWORD_ONLY)] * 2,
        [
            Parameter(name="x", kind=Parameter.KIND_KEYWORD_ONLY),
            Parameter(name="y", kind=Parameter.KIND_POSITIONAL_ONLY),
        ],
    ],
)
def test_a_signature_that_python_does_not_have_is_refused(parameters: list[describe_pb2.Parameter]) -> None:
    with pytest.raises(MalformedMessage, match="'f' is described with no valid signature"):
        function_info(describe_pb2.Function(name="f", parameters=parameters))
