"""The unary methods, as any client with a generated stub uses them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from tests.conftest import Workers

import gradwire as gw
import gradwire_server as gws
from gradwire import wire
from gradwire.proto.v1 import autograd_pb2, describe_pb2, link_pb2
from gradwire_server.serving.unary import ERROR_METADATA

FORWARD = "/gradwire.v1.Worker/ForwardWithAutograd"
DESCRIBE = "/gradwire.v1.Worker/Describe"


@pytest.fixture
def channel(workers: Workers) -> Iterator[grpc.Channel]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(workers.a, options=options) as channel:
        yield channel


def forward(function: str, *args: object) -> bytes:
    encoder = wire.Encoder(attach_from=None)
    values = [encoder.value(arg, "arg") for arg in args]
    table, attachments = encoder.finish()
    assert not attachments
    request = autograd_pb2.ForwardWithAutogradRequest(function=function, args=values, tensors=table)
    return request.SerializeToString()


def result(response: bytes) -> object:
    message = autograd_pb2.ForwardWithAutogradResponse.FromString(response)
    return wire.Decoder(message.tensors, ()).value(message.result, "result")


def failure(channel: grpc.Channel, method: str, body: bytes) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(body, timeout=30)
    return caught.value


def test_a_client_that_knows_nothing_of_gradwire_calls_functions(workers: Workers) -> None:
    script = Path(__file__).with_name("unary_client.py")
    assert "import gradwire" not in script.read_text()
    done = subprocess.run(
        [sys.executable, "-I", str(script), workers.a], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["add"] == 42
    assert results["double"] == [2.0, 4.0, 6.0, 8.0]
    assert results["large response"] == 1_000_000
    assert results["unknown"][0] == "NOT_FOUND"
    assert "did you mean double" in results["unknown"][1]
    assert results["raised"] == ["UNKNOWN", "builtins.ValueError: it failed"]
    assert "double" in results["functions"]
    assert {"CleanupContext", "ForwardWithAutograd", "Link", "PropagateGradients"} <= set(results["methods"])


def test_tensors_go_there_and_back_in_the_message(channel: grpc.Channel) -> None:
    x = torch.randn(1000, 1000)
    answer = result(channel.unary_unary(FORWARD)(forward("double", x), timeout=30))
    assert isinstance(answer, torch.Tensor)
    assert torch.equal(answer, 2 * x)


def test_an_error_carries_all_that_a_link_would_tell(channel: grpc.Channel) -> None:
    error = failure(channel, FORWARD, forward("fail", "KeyError", "missing"))
    metadata = dict(error.trailing_metadata())
    told = link_pb2.Error.FromString(metadata[ERROR_METADATA])
    assert told.code == link_pb2.Error.CODE_RAISED
    assert told.types[0] == "builtins.KeyError"
    assert "in fail" in told.traceback
    assert told.worker == "a"


@pytest.mark.parametrize(("text", "repeat"), [("x", 1_000_000), ("\u20ac", 100_000), ("\n\x00", 5)])
def test_an_error_of_any_length_and_letters_arrives(channel: grpc.Channel, text: str, repeat: int) -> None:
    error = failure(channel, FORWARD, forward("fail", "ValueError", text * repeat))
    assert error.code() is grpc.StatusCode.UNKNOWN
    assert error.details().startswith("builtins.ValueError: ")


@pytest.mark.parametrize(
    ("function", "args", "status"),
    [
        ("no_such", (), grpc.StatusCode.NOT_FOUND),
        ("add", (), grpc.StatusCode.INVALID_ARGUMENT),
        ("fail", (), grpc.StatusCode.UNKNOWN),
        ("unencodable", (), grpc.StatusCode.FAILED_PRECONDITION),
        ("call_back", ("f",), grpc.StatusCode.UNKNOWN),
    ],
)
def test_each_error_has_its_status(
    channel: grpc.Channel, function: str, args: tuple[object, ...], status: grpc.StatusCode
) -> None:
    assert failure(channel, FORWARD, forward(function, *args)).code() is status


@pytest.mark.parametrize(
    "method", ["ForwardWithAutograd", "PropagateGradients", "CleanupContext", "Describe"]
)
@pytest.mark.parametrize("body", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a" * 1000])
def test_what_is_no_message_is_refused(channel: grpc.Channel, method: str, body: bytes) -> None:
    error = failure(channel, f"/gradwire.v1.Worker/{method}", body)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"the body is no {method}Request" in error.details()


def test_what_is_too_large_is_refused_with_the_limit_and_the_way_out() -> None:
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    def large() -> torch.Tensor:
        return torch.zeros(2000)

    with gws.Worker(same, large, max_unary_bytes=5000) as worker:
        with grpc.insecure_channel(worker.address) as channel:
            for what, body in {
                "request": forward("same", torch.zeros(2000)),
                "response": forward("large"),
            }.items():
                error = failure(channel, FORWARD, body)
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert f"a {what} of 8" in error.details()
                assert "the limit of 5000 bytes for a unary call; use the Link method" in error.details()
        with gw.connect(worker.address) as handle:
            assert handle.large().shape == (2000,)


def test_a_deadline_reaches_the_function(workers: Workers, channel: grpc.Channel) -> None:
    name = uuid.uuid4().hex
    future = channel.unary_unary(FORWARD).future(forward("wait_for_cancel", name), timeout=0.3)
    with gw.connect(workers.a) as worker:
        assert worker.happened(f"{name} was cancelled")
    # Both clocks ran out at the same time: whichever was first.
    assert future.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK)


def test_cancelling_reaches_the_function(workers: Workers, channel: grpc.Channel) -> None:
    name = uuid.uuid4().hex
    future = channel.unary_unary(FORWARD).future(forward("wait_for_cancel", name))
    with gw.connect(workers.a) as worker:
        assert worker.happened(f"{name} runs")
        future.cancel()
        assert worker.happened(f"{name} was cancelled")


def test_a_unary_call_that_runs_when_the_worker_stops_is_cut_off() -> None:
    runs = threading.Event()

    def forever() -> None:
        runs.set()
        while not gw.cancelled():
            threading.Event().wait(0.001)

    worker = gws.Worker(forever).start()
    with grpc.insecure_channel(worker.address) as channel:
        future = channel.unary_unary(FORWARD).future(forward("forever"))
        assert runs.wait(20)
        assert worker.stop(grace=0.05) is False
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            future.result(20)


def test_describe_lists_what_can_be_called(channel: grpc.Channel) -> None:
    response = describe_pb2.DescribeResponse.FromString(channel.unary_unary(DESCRIBE)(b"", timeout=30))
    assert response.name == "a"
    assert "double" in [function.name for function in response.functions]
