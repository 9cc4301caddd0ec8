"""Checks with its gRPC health service whether a worker serves: `python -m gradwire_server.health HOST:PORT`.

For container health checks and scripts. It does not load torch, which takes seconds. The exit status is 0 if
the response is SERVING, else 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

__all__ = ["check", "main"]


def check(address: str, timeout: float = 3.0) -> str:
    """The name of the worker's serving status. Raises `grpc.RpcError` if no response comes in time."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire_server.health", description="Check whether a worker serves."
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds to wait for the response (3)")
    options = parser.parse_args(argv)
    try:
        status = check(options.address, options.timeout)
    except grpc.RpcError as error:
        print(f"{options.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    print(f"{options.address}: {status}")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
