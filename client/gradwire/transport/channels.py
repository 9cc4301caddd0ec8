"""gRPC channel and server options, each with the reason for it."""

from __future__ import annotations

import grpc

from gradwire.proto.v1 import worker_pb2
from gradwire.system.certificates import Certificates
from gradwire.transport.base import LinkSettings

__all__ = ["LINK_METHOD", "SERVICE", "client_options", "open_channel", "server_options", "silence_before_cut"]

# Taken from the descriptor, so that server reflection finds it under the same name.
SERVICE: str = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
LINK_METHOD = f"/{SERVICE}/Link"

Options = list[tuple[str, int | str]]


def silence_before_cut(settings: LinkSettings) -> float:
    """How many seconds a ping may go without a response."""
    return max(settings.lost_after / 4, 0.1)


def _common(settings: LinkSettings) -> Options:
    # A peer that is stopped, or a cable that is cut, must be noticed well within `lost_after`.
    interval = max(int(settings.lost_after * 1000 / 8), 100)
    timeout = int(silence_before_cut(settings) * 1000)
    return [
        # A message over gRPC's own limit would end the stream. Sessions check
        # sizes themselves and report errors.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", interval),
        # gRPC does not honour keepalive_timeout_ms alone; ping_timeout_ms takes effect.
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def client_options(settings: LinkSettings) -> Options:
    return [
        *_common(settings),
        # Channels with equal options would share a connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A proxy from the environment is not meant for connections to workers.
        ("grpc.enable_http_proxy", 0),
    ]


def open_channel(target: str, settings: LinkSettings, certificates: Certificates | None) -> grpc.Channel:
    """A channel to a worker, with TLS if there are certificates."""
    options = client_options(settings)
    if certificates is None:
        return grpc.insecure_channel(target, options=options)
    if settings.tls is not None and settings.tls.server_name:
        options.append(("grpc.ssl_target_name_override", settings.tls.server_name))
    credentials = grpc.ssl_channel_credentials(certificates.ca, certificates.key, certificates.cert)
    return grpc.secure_channel(target, credentials, options=options)


def server_options(settings: LinkSettings) -> Options:
    return [
        *_common(settings),
        # Otherwise a second server could silently share the port.
        ("grpc.so_reuseport", 0),
        # Otherwise gRPC would disconnect clients that ping an idle link, for "too many pings".
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 50),
    ]
