"""What is faster in C++: compiled from native/ (see CONTRIBUTING.md).

`Link` is one end of a link: the state machine of its session (native/session.hpp says what that guarantees
and how), and the socket that carries it, if it has one (native/link.hpp). `now` is the time of a monotonic
clock, in seconds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from typing_extensions import Buffer

compiler: str
"""What it was built with, e.g. "g++ 12.2.0"."""

MOST_ATTACHMENTS: int
"""How many attachments a message may have."""

REQUEST: int
"""A request is to be served. `id` is the request's."""
RESPONSE: int
"""The response to a call. `id` is the call's handle."""
ERROR: int
"""The other peer responded with an error. `body` is the serialized link_pb2.Error."""
EXPIRED: int
"""The deadline of a call has passed."""
NO_MEMORY: int
"""There is no memory for the attachments of the response to a call."""
UNREACHABLE: int
"""A call that does not wait for a connection would have had to."""
DISCARDED: int
"""The response to a call that was withdrawn, or had expired; without its attachments."""
CANCELLED: int
"""The requester no longer wants the response. `id` is the request's."""
ACKNOWLEDGED: int
"""The requester has the response to a request, or does not want it. `id` is the request's."""
CHECK: int
"""All of a message but its last bytes has been sent. `id` is for `confirm`, which lets them go, and `reject`.
"""
TIMER: int
"""`next_tick` is earlier than it was."""
DISCONNECTED: int
"""The socket was closed. `id` is its number, `body` says why."""
BROKEN: int
"""The other peer broke the protocol: the session is to be closed. `body` says how."""
GOODBYE: int
"""The other peer ended the session: `end` is to follow. `body` is the serialized link_pb2.Error, or empty."""

EVENTS: int
"""There is something to handle."""
SETTLED: int
"""There is no such call any more."""
UNREAD: int
"""It is not for this thread to read, or there is no socket."""
INTERRUPTED: int
"""By the time, or a signal."""

def next_work() -> tuple[Any, bool]:
    """Waits until a link has events that no caller handles. Returns what was given with `connect` or
    `attach`, and whether one more thread should call this. None instead of the former: there are threads
    enough, or no connections."""

def is_used() -> bool:
    """Whether there is a link with a connection in this process that `next_work` may lead to."""

def needs_thread() -> bool:
    """Whether there is such a link, and no thread waits in `next_work`."""

def about_to_block() -> None:
    """The calling thread, which handles what it got from `next_work`, is about to wait."""

def after_fork() -> None:
    """Forgets the event loop of the parent process."""

def trim_pool(seconds: float, /) -> bool:
    """Gives back memory that attachments arrived in, if it was not used again for `seconds`. Returns whether
    any is kept."""

class ProtocolError(Exception):
    """The other peer broke the protocol: the session is to be closed."""

@final
class Block:
    """Memory that an attachment arrived in, as a writable buffer. It belongs to the receiver."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

@final
class Budget:
    """What several sessions may use together for large requests that arrive, or wait to be served."""

    def __new__(cls, max_bytes: int) -> Budget: ...
    @property
    def used(self) -> int: ...

class Event(NamedTuple):
    """Something that happened to a link."""

    kind: int
    id: int
    method: int
    deadline: float | None
    flag: bool
    """REQUEST: whether it has been cancelled meanwhile. CHECK: whether the message is a response. GOODBYE:
    whether the other process goes away. DISCONNECTED: whether this process had no descriptor left for shared
    memory."""
    body: bytes
    attachments: tuple[Block, ...]
    cookie: Any
    """What was given with the call; with CHECK of a response, what was given with that."""

@final
class Link:
    """A session that several threads use, and its socket.

    It ends with `end`: the garbage collector does not see the cookies of its calls.
    """

    def __new__(
        cls,
        *,
        seed: int,
        refusal: bytes,
        cancelled: bytes,
        no_memory: bytes,
        budget: Budget = ...,
        max_body_bytes: int = ...,
        max_message_bytes: int = ...,
        max_quota_bytes: int = ...,
        max_window_bytes: int = ...,
        max_inbound_calls: int = ...,
        chunk_bytes: int = ...,
        patience: float = ...,
    ) -> Link:
        """`refusal`, `cancelled` and `no_memory` are the serialized errors that the other peer gets for
        requests that exceed the quota, were cancelled, or have attachments for which there is no memory."""

    # Calls of this peer.
    def call(
        self,
        now: float,
        method: int,
        body: bytes,
        attachments: Sequence[Buffer] = (),
        timeout: float | None = None,
        nested: bool = False,
        checked: bool = False,
        cookie: object = None,
        waits_for_connection: bool = True,
        /,
    ) -> int:
        """Sends a request. Returns the handle of the call; 0 if the session has ended."""

    def withdraw(self, now: float, handle: int, /) -> bool: ...
    def limit_window(self, now: float, max_bytes: int, /) -> None: ...
    def open_calls(self) -> list[Any]:
        """The cookies of the calls whose response is awaited."""

    # Requests of the other peer.
    def begin(self, id: int, /) -> None: ...
    def respond(
        self,
        id: int,
        body: bytes,
        attachments: Sequence[Buffer] = (),
        checked: bool = False,
        cookie: object = None,
        /,
    ) -> bool:
        """Returns whether the requester gets the response."""

    def fail(self, id: int, error: bytes, /) -> bool: ...
    def confirm(self, check: int, /) -> None: ...
    def reject(self, now: float, check: int, error: bytes, /) -> None:
        """The requester of a response gets the error instead; a request is withdrawn."""

    # The connection.
    def attach(self, now: float, owner: object = ..., /) -> None:
        """Continues over a new connection. With an owner, what is read from it goes to `feed`, and
        `next_work` returns the owner when there are events that no caller waits for."""

    def detach(self) -> None: ...
    def take_output(self, small_bytes: int = ..., bulk_bytes: int = 0, before: bytes = b"", /) -> bytes:
        """What is to be written next, after `before`."""

    def receive(self, now: float, data: Buffer, in_place: bool = False, /) -> None: ...
    def feed(self, data: Buffer, /) -> bool:
        """Takes bytes that were read. Returns whether there is something to write."""

    @property
    def attached(self) -> bool: ...
    @property
    def has_output(self) -> bool: ...

    # Time, and the end.
    @property
    def next_tick(self) -> float | None: ...
    def tick(self, now: float, /) -> None: ...
    def close(self, error: bytes | None = None, leaving: bool = False, /) -> None: ...
    def end(self) -> None: ...
    @property
    def heard_goodbye(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    @property
    def all_delivered(self) -> bool: ...
    def take_events(self, handle: int = 0, most_requests: int = ..., /) -> list[Event]:
        """What has happened, except outcomes of calls other than `handle` for which threads wait. It ends
        with the last of `most_requests` requests, or before the first for 0; `next_work` leads to the rest.
        """

    def take_checks(self) -> list[Event]:
        """Only those of kind CHECK."""

    # A socket that carries the session.
    def connect(self, descriptor: int, is_accepted: bool, owner: object, max_shared_bytes: int = 0, /) -> int:
        """Continues over a connected socket, which the session closes. `owner` is what `next_work` returns.
        A unix socket may have so many bytes of shared memory beside it. Returns a number for the socket."""

    def disconnect(self) -> None: ...
    def flush(self, is_large: bool = True, /) -> bool:
        """Writes to the socket, until it is full. Returns whether there are events."""

    def flush_soon(self, is_large: bool = True, /) -> bool: ...
    def wait(self, handle: int, seconds: float, /) -> int:
        """Waits for events, for the outcome of the call at best, and reads the socket meanwhile."""

    def read_in_background(self, more: int, /) -> None:
        """`more` is 1 when somebody waits for a response without `wait`, and -1 when nobody does any more."""

    def statistics(self) -> dict[str, int]: ...
