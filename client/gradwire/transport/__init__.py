"""Moving messages between nodes. Knows nothing of tensors, functions or autograd.

`Link` is the seam; `GrpcLink` and `InProcessLink` are its implementations.
"""

from gradwire.transport import faults, frames
from gradwire.transport.base import (
    Buffer,
    Exchange,
    Handler,
    Identity,
    Link,
    LinkSettings,
    Pending,
    Received,
    Sendable,
    Traffic,
    call_each,
)
from gradwire.transport.conversation import Conversation, Streams
from gradwire.transport.grpc_link import PROTOCOL, GrpcLink
from gradwire.transport.in_process import InProcessLink
from gradwire.transport.timers import Timer, call_later

__all__ = [
    "PROTOCOL",
    "Buffer",
    "Conversation",
    "Exchange",
    "GrpcLink",
    "Handler",
    "Identity",
    "InProcessLink",
    "Link",
    "LinkSettings",
    "Pending",
    "Received",
    "Sendable",
    "Streams",
    "Timer",
    "Traffic",
    "call_each",
    "call_later",
    "faults",
    "frames",
]
