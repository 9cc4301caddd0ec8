"""A client with nothing but the generated stub: tensors are bytes, gradients come back as bytes."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import grpc
import pytest
import torch
from tests.autograd.places import remote_place

import gradwire as gw
import gradwire_server as gws
from gradwire.proto.v1 import autograd_pb2, tensor_pb2, value_pb2, worker_pb2_grpc

NODE = 0x1234_5678_9ABC_DEF0
FLOAT64 = tensor_pb2.DTYPE_FLOAT64


@pytest.fixture(params=[30.0])
def worker(request: pytest.FixtureRequest) -> Iterator[gws.Worker]:
    with gws.Worker(*remote_place("a").functions, name="a", lease=request.param) as worker:
        yield worker


with_a_short_lease = pytest.mark.parametrize("worker", [0.5], indirect=True)


@pytest.fixture
def stub(worker: gws.Worker) -> Iterator[worker_pb2_grpc.WorkerStub]:
    with grpc.insecure_channel(worker.address) as channel:
        yield worker_pb2_grpc.WorkerStub(channel)


def table_of(values: list[float], shape: list[int], requires_grad: bool = False) -> tensor_pb2.TensorTable:
    data = struct.pack(f"<{len(values)}d", *values)
    return tensor_pb2.TensorTable(
        storages=[tensor_pb2.Storage(size=len(data), inline=data)],
        tensors=[tensor_pb2.Tensor(dtype=FLOAT64, shape=shape, requires_grad=requires_grad)],
    )


def values_of(table: tensor_pb2.TensorTable, index: int) -> list[float]:
    tensor = table.tensors[index]
    data = table.storages[tensor.storage].inline
    count = 1
    for size in tensor.shape:
        count *= size
    return list(struct.unpack_from(f"<{count}d", data, tensor.offset * 8))


def context_id(number: int) -> autograd_pb2.ContextId:
    return autograd_pb2.ContextId(peer=NODE, number=number)


def forward(
    stub: worker_pb2_grpc.WorkerStub, values: list[float], context: int, message: int
) -> autograd_pb2.ForwardWithAutogradResponse:
    request = autograd_pb2.ForwardWithAutogradRequest(
        function="affine",
        args=[value_pb2.Value(tensor=0)],
        tensors=table_of(values, [2, 3], requires_grad=True),
        autograd=autograd_pb2.AutogradMetadata(
            context=context_id(context), message=autograd_pb2.AutogradMessageId(peer=NODE, number=message)
        ),
    )
    response: autograd_pb2.ForwardWithAutogradResponse = stub.ForwardWithAutograd(request, timeout=30)
    return response


def propagate(
    stub: worker_pb2_grpc.WorkerStub, response: autograd_pb2.ForwardWithAutogradResponse, context: int
) -> autograd_pb2.PropagateGradientsResponse:
    request = autograd_pb2.PropagateGradientsRequest(
        context=context_id(context),
        gradients=autograd_pb2.Gradients(message=response.autograd.message, slots=[0], tensors=[0]),
        tensors=table_of([1.0] * 6, [2, 3]),
    )
    getattr(request, "pass").CopyFrom(autograd_pb2.AutogradMessageId(peer=NODE, number=99))
    answer: autograd_pb2.PropagateGradientsResponse = stub.PropagateGradients(request, timeout=30)
    return answer


def parameter_gradients(stub: worker_pb2_grpc.WorkerStub, context: int) -> dict[str, list[float]]:
    request = autograd_pb2.ForwardWithAutogradRequest(
        function="gradients", autograd=autograd_pb2.AutogradMetadata(context=context_id(context))
    )
    response = stub.ForwardWithAutograd(request, timeout=30)
    return {
        entry.key.text: values_of(response.tensors, entry.value.tensor)
        for entry in response.result.dict.entries
        if entry.value.WhichOneof("kind") == "tensor"
    }


def test_a_full_step_with_nothing_but_the_stub(stub: worker_pb2_grpc.WorkerStub, worker: gws.Worker) -> None:
    values = [0.1, -0.2, 0.3, 0.4, 0.5, -0.6]
    response = forward(stub, values, context=7, message=1)
    assert response.tensors.tensors[0].requires_grad
    assert [(id.peer, id.number) for id in response.autograd.depends_on] == [(NODE, 1)]
    answer = propagate(stub, response, context=7)

    place = remote_place("a")
    x = torch.tensor(values, dtype=torch.float64).reshape(2, 3).requires_grad_()
    out = place.affine(x)
    out.sum().backward()
    assert values_of(response.tensors, 0) == pytest.approx(out.flatten().tolist(), abs=1e-12)
    (contribution,) = answer.contributions
    assert (contribution.message.peer, contribution.message.number) == (NODE, 1)
    assert list(contribution.slots) == [0]
    assert x.grad is not None
    found = values_of(answer.tensors, contribution.tensors[0])
    assert found == pytest.approx(x.grad.flatten().tolist(), abs=1e-12)
    assert place.weight.grad is not None
    weight = parameter_gradients(stub, context=7)["weight"]
    assert weight == pytest.approx(place.weight.grad.flatten().tolist(), abs=1e-12)

    cleanup = autograd_pb2.CleanupContextRequest(context=context_id(7))
    assert stub.CleanupContext(cleanup, timeout=30).found is True
    assert stub.CleanupContext(cleanup, timeout=30).found is False
    assert worker._peer.engine.container.contexts() == []


def test_a_second_propagation_needs_retain_graph(stub: worker_pb2_grpc.WorkerStub) -> None:
    response = forward(stub, [0.0] * 6, context=8, message=1)
    propagate(stub, response, context=8)
    with pytest.raises(grpc.RpcError) as caught:
        propagate(stub, response, context=8)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "retain_graph" in caught.value.details()


@with_a_short_lease
def test_what_is_not_used_for_as_long_as_the_lease_is_dropped(
    stub: worker_pb2_grpc.WorkerStub, worker: gws.Worker
) -> None:
    """There is no link whose end would tell."""
    response = forward(stub, [0.0] * 6, context=9, message=1)
    store = worker._peer.engine.container
    assert store._results
    give_up_at = time.monotonic() + 20
    while store.contexts():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    assert not store._results
    with pytest.raises(grpc.RpcError) as caught:
        propagate(stub, response, context=9)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "lease" in caught.value.details()


@with_a_short_lease
def test_use_renews_the_lease(stub: worker_pb2_grpc.WorkerStub, worker: gws.Worker) -> None:
    response = forward(stub, [0.0] * 6, context=10, message=1)
    used_until = time.monotonic() + 1.5  # three times the lease
    while time.monotonic() < used_until:
        parameter_gradients(stub, context=10)
    assert propagate(stub, response, context=10).contributions


@with_a_short_lease
def test_what_came_over_a_link_is_kept_for_as_long_as_the_link_is(worker: gws.Worker) -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    with gw.connect(worker.address) as client:
        out = client.affine(x)
        store = worker._peer.engine.container
        swept_until = time.monotonic() + 1.5  # three times the lease
        while time.monotonic() < swept_until:
            assert store._results
            time.sleep(0.05)
        out.sum().backward()
    assert x.grad is not None
