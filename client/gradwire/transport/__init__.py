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
from gradwire.transport.conversation import Conversation
from gradwire.transport.grpc_link import PROTOCOL, GrpcLink
from gradwire.transport.in_process import InProcessLink
from gradwire.transport.local_streams import LocalStreams
from gradwire.transport.lookout import BRISK_SECONDS
from gradwire.transport.reception import Reception
from gradwire.transport.room import Room
from gradwire.transport.same_host import MeetingPoint, confirm
from gradwire.transport.streams import StreamPair, Streams
from gradwire.transport.timers import Timer, call_later

__all__ = [
    "BRISK_SECONDS",
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
    "LocalStreams",
    "MeetingPoint",
    "Pending",
    "Received",
    "Reception",
    "Room",
    "Sendable",
    "StreamPair",
    "Streams",
    "Timer",
    "Traffic",
    "call_each",
    "call_later",
    "confirm",
    "faults",
    "frames",
]
