"""A client of the unary methods that knows nothing of gradwire: all it has comes from server reflection.

Run as ``python -I unary_client.py HOST:PORT``. Prints what it got as JSON.
"""

import json
import struct
import sys

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

SERVICE = "gradwire.v1.Worker"


def fetch_descriptors(channel: grpc.Channel) -> descriptor_pool.DescriptorPool:
    """The files that define the service, as the server itself tells them."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    (response,) = stub.ServerReflectionInfo(iter([request]))
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in response.file_descriptor_response.file_descriptor_proto
    ]
    pool, added = descriptor_pool.DescriptorPool(), set()
    while len(added) < len(files):
        for file in files:
            if file.name not in added and all(needed in added for needed in file.dependency):
                pool.Add(file)
                added.add(file.name)
    return pool


def main(target: str) -> None:
    results: dict[str, object] = {}
    with grpc.insecure_channel(target) as channel:
        pool = fetch_descriptors(channel)
        service = pool.FindServiceByName(SERVICE)
        results["methods"] = sorted(method.name for method in service.methods)

        def call(name: str, request: object, timeout: float | None = 20) -> object:
            method = service.FindMethodByName(name)
            return channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
            )(request, timeout=timeout)

        def message(name: str) -> type:
            return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"gradwire.v1.{name}"))

        Forward = message("ForwardWithAutogradRequest")

        request = Forward(function="add")
        request.args.add(integer=20)
        request.kwargs["y"].integer = 1
        request.kwargs["scale"].integer = 2
        results["add"] = call("ForwardWithAutograd", request).result.integer

        request = Forward(function="double")
        request.args.add(tensor=0)
        dtype = request.tensors.tensors.add(shape=[2, 2]).DESCRIPTOR.fields_by_name["dtype"].enum_type
        request.tensors.tensors[0].dtype = dtype.values_by_name["DTYPE_FLOAT32"].number
        request.tensors.storages.add(size=16, inline=struct.pack("<4f", 1, 2, 3, 4))
        response = call("ForwardWithAutograd", request)
        storage = response.tensors.storages[response.tensors.tensors[response.result.tensor].storage]
        results["double"] = struct.unpack("<4f", storage.inline)

        request = Forward(function="zeros")
        request.args.add(integer=1_000_000)
        response = call("ForwardWithAutograd", request)
        results["large response"] = len(response.tensors.storages[0].inline)

        for name, function in {"unknown": "duble", "raised": "fail"}.items():
            try:
                call("ForwardWithAutograd", Forward(function=function))
            except grpc.RpcError as error:
                results[name] = [error.code().name, error.details()]

        described = call("Describe", message("DescribeRequest")())
        results["functions"] = [function.name for function in described.functions]
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
