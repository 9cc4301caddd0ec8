"""Whether the connection to a worker is direct, or a proxy lies in between, which must not be bypassed.

If a proxy accepts a connection and opens another, the worker sees an address that leads elsewhere.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from urllib.parse import unquote

__all__ = ["Address", "host_and_port", "remote_of"]

Address = tuple[str, int]

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_ESTABLISHED = "01"


def remote_of(seen: str, target: str) -> Address | None:
    """The worker's end of this process's TCP connection to the target, of which the worker sees the other end
    at `seen`. None if there is no such connection: a proxy lies in between, or it is no TCP connection."""
    local = _parse(seen)
    if local is None:
        return None
    wanted = _resolve(target)
    return next((remote for remote in _remotes_of(local) if remote in wanted), None)


def _parse(address: str) -> Address | None:
    """Parses an address as gRPC writes it: ``ipv4:127.0.0.1:50051`` or ``ipv6:%5B::1%5D:50051``."""
    kind, _, rest = unquote(address).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """The canonical form of an IP address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def host_and_port(target: str) -> Address:
    """Parses a target, which may be in one of gRPC's own forms. Raises ValueError for other forms."""
    name = target
    for prefix in ("dns:", "ipv4:", "ipv6:"):
        name = name.removeprefix(prefix)
    host, _, port = name.rpartition("/")[2].rpartition(":")
    return host.strip("[]"), int(port)


def _resolve(target: str) -> set[Address]:
    try:
        found = socket.getaddrinfo(*host_and_port(target), type=socket.SOCK_STREAM)
        return {(_plain(str(address[0])), int(address[1])) for *_, address in found}
    except (OSError, ValueError):
        return set()


def _remotes_of(local: Address) -> Iterator[Address]:
    """The remote addresses of the TCP connections with this local address, according to the kernel."""
    for table in _TABLES:
        try:
            with open(table) as lines:
                next(lines)
                for line in lines:
                    fields = line.split()
                    if fields[3] != _ESTABLISHED:
                        continue  # what is left of an earlier connection from the same port
                    if int(fields[1].rpartition(":")[2], 16) == local[1] and _hex_address(fields[1]) == local:
                        yield _hex_address(fields[2])
        except (OSError, StopIteration):
            continue


def _hex_address(text: str) -> Address:
    """Parses an address as /proc writes it: 32-bit words in the byte order of the machine."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _plain(str(ipaddress.ip_address(packed))), int(port, 16)
