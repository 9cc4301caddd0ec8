"""Moving messages between peers. Knows nothing of tensors, functions or autograd.

`Link` is the seam; `GrpcLink` and `InProcessLink` are its implementations.
"""

from gradwire.transport import direct, faults, frames, grpc_messages, handshake, same_host
from gradwire.transport.base import (
    Buffer,
    Handler,
    Link,
    LinkSettings,
    Payload,
    ResponseFuture,
    Sendable,
    ServerCall,
    Traffic,
)
from gradwire.transport.carriers import GrpcStream, SocketCarrier
from gradwire.transport.grpc_link import PROTOCOL, GrpcLink
from gradwire.transport.handshake import SocketListener
from gradwire.transport.identity import KnownWorkers, OwnIdentity, PeerIdentity, is_secret_of
from gradwire.transport.in_process import InProcessLink
from gradwire.transport.session import Budget, Session
from gradwire.transport.tls import Tls

__all__ = [
    "PROTOCOL",
    "Budget",
    "Buffer",
    "GrpcLink",
    "GrpcStream",
    "Handler",
    "InProcessLink",
    "KnownWorkers",
    "Link",
    "LinkSettings",
    "OwnIdentity",
    "Payload",
    "PeerIdentity",
    "ResponseFuture",
    "Sendable",
    "ServerCall",
    "Session",
    "SocketCarrier",
    "SocketListener",
    "Tls",
    "Traffic",
    "direct",
    "faults",
    "frames",
    "grpc_messages",
    "handshake",
    "is_secret_of",
    "same_host",
]
