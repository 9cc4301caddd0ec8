"""gRPC channel and server options, each with the reason for it."""

from __future__ import annotations

from gradwire.proto.v1 import worker_pb2
from gradwire.transport.base import LinkSettings

__all__ = ["LINK_METHOD", "SERVICE", "client_options", "server_options", "silence_before_cut"]

# From the descriptor, so that it is there to be asked for through server reflection.
SERVICE: str = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
LINK_METHOD = f"/{SERVICE}/Link"

Options = list[tuple[str, int | str]]


def silence_before_cut(settings: LinkSettings) -> float:
    """How long a ping may stay without an answer, in seconds."""
    return max(settings.lost_after / 4, 0.1)


def _common(settings: LinkSettings) -> Options:
    # A peer that is stopped, or a cable that is cut, must be noticed well within `lost_after`.
    interval = max(int(settings.lost_after * 1000 / 8), 100)
    timeout = int(silence_before_cut(settings) * 1000)
    return [
        # A message over gRPC's own limit kills the whole stream; we check sizes ourselves and say so.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.keepalive_time_ms", interval),
        # keepalive_timeout_ms alone is not honoured; ping_timeout_ms is what counts.
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def client_options(settings: LinkSettings, role: str) -> Options:
    return [
        *_common(settings),
        # Channels with equal options would share a connection, and large transfers hold up small messages.
        ("gradwire.role", role),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A proxy from the environment is not meant for workers.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(settings: LinkSettings) -> Options:
    return [
        *_common(settings),
        # Else a second server would share the port without a word.
        ("grpc.so_reuseport", 0),
        # Else clients that ping an idle link are cut off for "too many pings".
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 50),
    ]
