"""Checks with its gRPC health service whether a worker serves: `python -m gradwire_server.health HOST:PORT`.

For container health checks and scripts. It does not load torch, which takes seconds. The exit status is 0 if
the response is SERVING, else 1.

With the environment of a worker that speaks TLS it does so, too, and trusts GRADWIRE_TLS_CA, or without that
GRADWIRE_TLS_CERT, the very certificate of the worker.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gradwire.system.certificates import BadCertificates, CertificateFiles, read_certificates

__all__ = ["check", "main"]


def check(
    address: str, timeout: float = 3.0, tls: CertificateFiles | None = None, server_name: str | None = None
) -> str:
    """The name of the worker's serving status. Raises `grpc.RpcError` if no response comes in time, and
    BadCertificates if a file cannot be used."""
    with _channel(address, tls, server_name) as channel:
        request = health_pb2.HealthCheckRequest()
        response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def _channel(address: str, tls: CertificateFiles | None, server_name: str | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address)
    found = read_certificates(tls)
    credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.cert)
    options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return grpc.secure_channel(address, credentials, options)


def _setting(name: str) -> str | None:
    return os.environ.get(f"GRADWIRE_TLS_{name}") or None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire_server.health", description="Check whether a worker serves."
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds to wait for the response (3)")
    cert = _setting("CERT")
    ca = _setting("CA") or cert
    for flag, default, said in (
        ("--tls-ca", ca, "PEM file with the CA of the worker"),
        ("--tls-cert", cert, "PEM file with a certificate to show to the worker"),
        ("--tls-key", _setting("KEY"), "PEM file with the key of that certificate"),
    ):
        parser.add_argument(flag, metavar="FILE", default=default, help=said)
    parser.add_argument(
        "--tls-server-name",
        metavar="NAME",
        default=_setting("SERVER_NAME"),
        help="for whom the worker's certificate is, if not for HOST",
    )
    options = parser.parse_args(argv)
    files = CertificateFiles(options.tls_ca, options.tls_cert, options.tls_key)
    is_plain = files == CertificateFiles() or options.address.startswith("unix:")
    # gRPC would write lines of its own to stderr.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        status = check(options.address, options.timeout, None if is_plain else files, options.tls_server_name)
    except grpc.RpcError as error:
        print(f"{options.address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except BadCertificates as error:
        print(f"{options.address}: {error}", file=sys.stderr)
        return 1
    print(f"{options.address}: {status}")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
