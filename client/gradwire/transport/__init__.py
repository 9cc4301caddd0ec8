"""Moving messages between peers. Knows nothing of tensors, functions or autograd.

`Link` is the seam; `GrpcLink` and `InProcessLink` are its implementations.
"""

from gradwire.transport import faults, frames
from gradwire.transport.base import (
    Buffer,
    Handler,
    Link,
    LinkSettings,
    Payload,
    PeerIdentity,
    ResponseFuture,
    Sendable,
    ServerCall,
    Traffic,
)
from gradwire.transport.event_loop import EventLoop
from gradwire.transport.grpc_link import PROTOCOLS, GrpcLink, NativeGrpcLink, new_grpc_link
from gradwire.transport.in_process import InProcessLink
from gradwire.transport.local_streams import LocalStreams
from gradwire.transport.memory_budget import MemoryBudget
from gradwire.transport.native_session import Budget, NativeSession, NativeStream
from gradwire.transport.same_host import LocalListener, accept_handshake
from gradwire.transport.session import Session
from gradwire.transport.streams import StreamPair, Streams

__all__ = [
    "PROTOCOLS",
    "Budget",
    "Buffer",
    "EventLoop",
    "GrpcLink",
    "Handler",
    "InProcessLink",
    "Link",
    "LinkSettings",
    "LocalListener",
    "LocalStreams",
    "MemoryBudget",
    "NativeGrpcLink",
    "NativeSession",
    "NativeStream",
    "Payload",
    "PeerIdentity",
    "ResponseFuture",
    "Sendable",
    "ServerCall",
    "Session",
    "StreamPair",
    "Streams",
    "Traffic",
    "accept_handshake",
    "faults",
    "frames",
    "new_grpc_link",
]
