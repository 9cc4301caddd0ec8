"""Connecting to workers by their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import copy_context
from dataclasses import replace
from typing import overload

from gradwire.api.device_maps import NO_MAP, Device, DeviceMap
from gradwire.api.workers import RemoteWorker
from gradwire.errors import ConnectFailed
from gradwire.peers.current import current_peer
from gradwire.peers.local import LocalPeer
from gradwire.runtime.compression import NOT_COMPRESSED, Compression
from gradwire.transport import LinkSettings, Tls

__all__ = ["connect"]


@overload
def connect(
    target: str,
    *,
    connect_timeout: float = ...,
    lost_after: float = ...,
    wait_for_ready: bool = ...,
    same_host: bool = ...,
    direct: bool = ...,
    tls: Tls | bool | None = ...,
    max_tensor_elements: int = ...,
    device_map: Mapping[Device, Device] | None = ...,
    compress: Compression | None = ...,
) -> RemoteWorker: ...


@overload
def connect(
    target: list[str] | tuple[str, ...],
    *,
    connect_timeout: float = ...,
    lost_after: float = ...,
    wait_for_ready: bool = ...,
    same_host: bool = ...,
    direct: bool = ...,
    tls: Tls | bool | None = ...,
    max_tensor_elements: int = ...,
    device_map: Mapping[Device, Device] | None = ...,
    compress: Compression | None = ...,
) -> list[RemoteWorker]: ...


def connect(
    target: str | list[str] | tuple[str, ...],
    *,
    connect_timeout: float = LinkSettings.connect_timeout,
    lost_after: float = LinkSettings.lost_after,
    wait_for_ready: bool = True,
    same_host: bool = True,
    direct: bool = True,
    tls: Tls | bool | None = None,
    max_tensor_elements: int = LinkSettings.max_tensor_elements,
    device_map: Mapping[Device, Device] | None = None,
    compress: Compression | None = None,
) -> RemoteWorker | list[RemoteWorker]:
    """Connects to a worker at ``"host:port"`` or ``"unix:path"``, or to several at once.

    To connect again to the same target is cheap: the link is shared. Raises `ConnectFailed` if no worker
    responds within `connect_timeout` seconds. A worker that cannot be reached for `lost_after` seconds counts
    as lost: calls that wait for it then raise `WorkerLost`.

    During both times gradwire waits, and tries to connect again. With ``wait_for_ready=False`` it does not
    wait: connecting fails at the first refusal, and a call fails at once while the connection is cut. The
    connection is opened again in the background all the same.

    A worker on the same host is reached through a local socket, and large tensors cross in shared memory, if
    both processes belong to the same user and nothing such as a proxy lies between them. ``same_host=False``
    uses the network instead. A worker on another host is reached through a TCP socket beside its gRPC port,
    if that can be reached and no proxy lies between; ``direct=False`` leaves everything to gRPC.

    `tls` encrypts the link: ``tls=gw.Tls(ca="ca.pem")``. Without it the variables GRADWIRE_TLS_CA, _CERT,
    _KEY and _SERVER_NAME decide, and in a function of a worker that has a certificate that certificate is
    used. ``tls=True`` trusts gRPC's default root certificates if these name no CA, ``tls=False`` is plain
    text, as ``"unix:path"`` is unless told otherwise. Raises `ConnectFailed` at once if a file cannot be
    used, or if the worker will never take the connection.

    `max_tensor_elements` bounds the elements of a result whose bytes were not all sent, such as an expanded
    tensor: a larger one raises `ResourceExhausted` here. The worker has the same setting for arguments.

    `device_map` maps devices of this process to the worker's devices that arguments go to, e.g. ``{"cuda:0":
    "cuda:1"}``. Results come back by the reverse map, and gradients follow their tensors. Without it tensors
    arrive on the CPU. Raises `InvalidDeviceMap` if either end lacks a device.

    `compress` makes large tensors smaller on the wire, e.g. ``gw.Compression(backward="int8")``. Without it
    tensors are sent uncompressed. Raises `CodecUnavailable` if either end lacks a codec.
    """
    peer = current_peer()
    settings = LinkSettings(
        connect_timeout=connect_timeout,
        lost_after=lost_after,
        wait_for_ready=wait_for_ready,
        same_host=same_host,
        direct=direct,
        max_tensor_elements=max_tensor_elements,
    )
    devices = NO_MAP if device_map is None else DeviceMap(device_map)
    targets = [target] if isinstance(target, str) else target
    for address in targets:
        _check_address(address)
    compression = compress or NOT_COMPRESSED
    workers = [
        RemoteWorker(
            peer.shared_link_to(address, replace(settings, tls=_tls_for(address, tls, peer))),
            address,
            devices,
            compression,
        )
        for address in targets
    ]
    if len(workers) == 1:
        workers[0]._connect()
    else:
        # Each in a copy of this thread's context variables, so that the deadline in force bounds it.
        for connected in [peer.pool.submit(copy_context().run, worker._connect) for worker in workers]:
            connected.result()
    return workers[0] if isinstance(target, str) else workers


def _tls_for(target: str, tls: Tls | bool | None, peer: LocalPeer) -> Tls | None:
    if tls is None:
        return peer.tls_for(target)
    if isinstance(tls, Tls):
        return tls
    return (peer.tls_for(target) or Tls()) if tls else None


def _check_address(target: str) -> None:
    """Raises ConnectFailed at once for a target that is no address, and not after `connect_timeout`."""
    if target.startswith(("unix:", "dns:", "ipv4:", "ipv6:")):
        return  # gRPC's own forms
    host, _, port = target.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConnectFailed(
            f"{target!r} is no address: HOST:PORT or unix:PATH", worker=target, retryable=False
        )
