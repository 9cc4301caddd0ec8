"""The connecting end of a link over gRPC.

A thread of its own keeps the link: it opens the two streams, and new ones after a cut, until the other end
has been out of reach for too long or is not who it was. Others read the streams: what comes may set off code
that waits for this very link, and the thread that keeps it must be free to mend it. Where the worker is on
the same host, a local socket takes the place of the second stream, and carries everything.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc

from gradwire.errors import (
    ConnectFailed,
    DeadlineExceeded,
    GradwireError,
    InternalError,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from gradwire.proto.v1 import link_pb2
from gradwire.system.randomness import between, new_id
from gradwire.system.timers import Timer, call_later
from gradwire.transport import faults, frames
from gradwire.transport.base import Handler, LinkSettings, PeerIdentity
from gradwire.transport.channels import LINK_METHOD, client_options, silence_before_cut
from gradwire.transport.local_streams import LocalStreams
from gradwire.transport.same_host import meet
from gradwire.transport.session import Session
from gradwire.transport.streams import StreamPair, Streams

__all__ = ["PROTOCOL", "GrpcLink"]

log = logging.getLogger("gradwire.link")

PROTOCOL = 1
"""The version of the protocol that this code speaks."""

_FIRST_BACKOFF, _LAST_BACKOFF = 0.05, 1.0
_HANDSHAKE_SECONDS = 5.0
_FAREWELL_SECONDS = 2.0
_TAKING_IN_SECONDS = 0.5


class _Broken(Exception):
    """The streams ended; there may be another try."""


class GrpcLink(Session):
    """A link to a worker that listens. `connect` must come first."""

    def __init__(self, target: str, local: PeerIdentity, handler: Handler, settings: LinkSettings) -> None:
        super().__init__(local, PeerIdentity(0, target, ""), handler, settings)
        self.target = target
        self._session = new_id()
        self._patience = settings.connect_timeout
        self._tries_again = settings.wait_for_ready
        """To connect, for so long."""
        self._welcomed = False
        self._calls: tuple[Any, ...] = ()
        """The streams that are open or being opened."""
        self._carried = False
        """Whether they carry the session yet."""
        self._broke = ""
        """Why the first stream that broke did, once one has."""
        self._connected = threading.Event()
        self._ending = threading.Event()
        self._farewell: Timer | None = None
        self._keeper = threading.Thread(target=self._keep, name=f"gradwire-link-{target}", daemon=True)

    def connect(
        self,
        time_left: float | None = None,
        *,
        patience: float | None = None,
        tries_again: bool | None = None,
    ) -> None:
        """Returns when the other end has answered; raises ConnectFailed if it does not in time.

        `time_left` is what the surroundings allow: DeadlineExceeded if that is less. `patience` and
        `tries_again` take the place of what the settings say of `connect_timeout` and `wait_for_ready`.
        """
        if patience is not None:
            self._patience = patience
        if tries_again is not None:
            self._tries_again = tries_again
        self.when_ended(self._on_end)
        self._keeper.start()
        patience = self._patience + _HANDSHAKE_SECONDS
        if time_left is not None and time_left < patience:
            if not self._connected.wait(time_left):
                error = f"no time left to wait for {self.target} to answer"
                self.abort(DeadlineExceeded(error, worker=self.target))
        elif not self._connected.wait(patience):
            self.abort(self._lost("connecting got stuck"))
        if self._ended is not None:
            self._join_keeper()
            raise self._ended.again()

    def close(self, *, leaving: bool = False) -> None:
        super().close(leaving=leaving)
        self._join_keeper()

    def abort(self, error: GradwireError) -> None:
        super().abort(error)
        self._cut()

    def _on_end(self, _: object) -> None:
        self._ending.set()
        self._connected.set()
        if self._carried:
            # The goodbye has this long to leave; a peer that does not read must not keep the threads.
            self._farewell = call_later(_FAREWELL_SECONDS, self._cut)
        else:
            self._cut()

    def _cut(self) -> None:
        for call in self._calls:
            call.cancel()

    def _join_keeper(self) -> None:
        if self._keeper.is_alive() and threading.current_thread() is not self._keeper:
            self._keeper.join(2 * _FAREWELL_SECONDS)

    # -- the keeper's thread

    def _keep(self) -> None:
        try:
            with self._channel("control") as control, self._channel("bulk") as bulk:
                self._keep_over(control, bulk)
        except Exception as error:
            log.exception("the link to %s failed", self.peer)
            self.abort(InternalError(f"the link to {self.peer} failed: {error!r}"))
        finally:
            if self._farewell is not None:
                self._farewell.cancel()

    def _keep_over(self, control: grpc.Channel, bulk: grpc.Channel) -> None:
        give_up_at = time.monotonic() + self._patience
        backoff, attempt = _FIRST_BACKOFF, 0
        while self._ended is None:
            attempt += 1
            streams = StreamPair(self.settings, self.quota)
            reason = ""
            try:
                self._carry(control, bulk, streams, attempt, give_up_at)
            except _Broken as broken:
                reason = str(broken)
            except GradwireError as error:
                self.abort(error)
            finally:
                self._cut()
                streams.close(discard=True)
            if self.detach(streams):
                log.info("the link to %s was cut: %s", self.peer, reason)
                give_up_at = time.monotonic() + self.settings.lost_after
                if "ping timeout" in reason or "keepalive watchdog" in reason:  # gRPC says so in words only
                    give_up_at -= silence_before_cut(self.settings)
                backoff = _FIRST_BACKOFF
            impatient = not self._welcomed and not self._tries_again
            if self._ended is None and (impatient or time.monotonic() >= give_up_at):
                self.was_waited_for = self._welcomed
                self.abort(self._lost(reason))
            # Full jitter: many clients of one worker must not come back all at once.
            left = max(give_up_at - time.monotonic(), 0.0)
            self._ending.wait(min(between(0, backoff), left))
            backoff = min(2 * backoff, _LAST_BACKOFF)

    @contextmanager
    def _channel(self, role: str) -> Iterator[grpc.Channel]:
        channel = grpc.insecure_channel(self.target, options=client_options(self.settings, role))
        try:
            yield channel
        finally:
            channel.close()

    def _carry(
        self, control: grpc.Channel, bulk: grpc.Channel, streams: StreamPair, attempt: int, give_up_at: float
    ) -> None:
        """Opens the streams and reads until they end."""
        handshake = 0.0
        try:
            with self._cut_if_silent(give_up_at) as handshake:
                control_call = self._open(control, link_pb2.Hello.ROLE_CONTROL, streams, attempt)
                offer = self._welcome(_first_frame(control_call))
            connection = None
            if offer is not None and self.settings.same_host:
                # Half of the time that is left: if nobody answers there, the rest is for the network.
                connection = meet(offer, self.target, (give_up_at - time.monotonic()) / 2)
            if connection is None:
                with self._cut_if_silent(give_up_at) as handshake:
                    bulk_call = self._open(bulk, link_pb2.Hello.ROLE_BULK, streams, attempt)
                    if _first_frame(bulk_call).WhichOneof("kind") != "welcome":
                        raise _Broken("the stream for bulk data was refused")
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED and not self._welcomed:
                raise ConnectFailed(
                    f"a gRPC server answers at {self.target}, but it is no gradwire worker",
                    worker=self.target,
                ) from error
            raise _Broken(_explain(error, handshake)) from error
        if connection is None:
            self._carry_over_network(control_call, bulk_call, streams, handshake)
        else:
            self._carry_locally(control_call, connection, streams)

    @contextmanager
    def _cut_if_silent(self, give_up_at: float) -> Iterator[float]:
        """Gives a stream so many seconds to answer."""
        handshake = min(_HANDSHAKE_SECONDS, max(give_up_at - time.monotonic(), 0.1))
        timer = call_later(handshake, self._cut)
        try:
            yield handshake
        finally:
            timer.cancel()

    def _carry_locally(self, control_call: Any, connection: socket.socket, beneath: Streams) -> None:
        local = LocalStreams(self.settings, self.quota, connection, beneath)
        # What is wrong with the worker shows there: it is pinged, and a worker that stopped does not answer.
        if not control_call.add_callback(partial(local.close, discard=True)):
            local.close(discard=True)
        self.attach(local)
        self._carried = True
        self._connected.set()
        try:
            local.carry(self)
        except OSError as error:
            raise _Broken(f"the local socket cannot be read: {error}") from error
        finally:
            self._carried = False
        if self._ended is None:
            closed = "the worker closed the socket"
            raise _Broken(closed if control_call.is_active() else _explain(control_call, 0.0))

    def _carry_over_network(
        self, control_call: Any, bulk_call: Any, streams: Streams, handshake: float
    ) -> None:
        self._broke = ""
        over = threading.Event()
        readers = []
        self.attach(streams)
        self._carried = True
        for role, call in (("control", control_call), ("bulk", bulk_call)):
            name = f"gradwire-{role}-{self.target}"
            reader = threading.Thread(target=self._read, args=(call, streams), name=name, daemon=True)
            readers.append((call, reader))
            if not call.add_callback(over.set):
                over.set()
            reader.start()
        self._connected.set()
        try:
            over.wait()  # gRPC calls back whatever way a stream ends
            # What came before its end may be a goodbye. Unless its reader is stuck, it is taken in at once.
            next(reader for call, reader in readers if not call.is_active()).join(_TAKING_IN_SECONDS)
        finally:
            self._carried = False
            self._cut()
            streams.close(discard=True)
        if self._ended is None:
            raise _Broken(self._broke or _explain(control_call, handshake))

    def _open(
        self, channel: grpc.Channel, role: link_pb2.Hello.Role, streams: StreamPair, attempt: int
    ) -> Any:
        outbox = streams.control if role == link_pb2.Hello.ROLE_CONTROL else streams.bulk
        hello = link_pb2.Hello(
            protocol=PROTOCOL,
            peer=self.local.id,
            name=self.local.name,
            session=self._session,
            role=role,
            attempt=attempt,
            resume=self._welcomed,
            max_message_bytes=self.settings.max_message_bytes,
            max_bytes_in_flight=self.settings.max_bytes_in_flight,
            same_host=self.settings.same_host,
            codecs=self.settings.codecs,
        )
        outbox.put(frames.envelope(link_pb2.Frame(hello=hello)))
        # Frames are bytes already: no serializers.
        open_stream: Any = channel.stream_stream(LINK_METHOD)
        call = open_stream(iter(outbox))
        self._calls = (call,) if role == link_pb2.Hello.ROLE_CONTROL else (*self._calls, call)
        if self._ended is not None:
            call.cancel()  # whoever ended the link could not know of this one
        return call

    def _welcome(self, frame: link_pb2.Frame) -> link_pb2.SameHost | None:
        """Looks at how the worker answers. Returns the way around the network that it offers."""
        kind = frame.WhichOneof("kind")
        if kind == "goodbye":
            error = faults.rebuild(frame.goodbye.error)
            if isinstance(error, Unavailable):
                raise _Broken(str(error))  # it shuts down; another may take its place
            raise error
        if kind != "welcome":
            raise ProtocolError(f"{self.target} answered Hello with {kind}", worker=self.target)
        welcome = frame.welcome
        if welcome.protocol != PROTOCOL:
            raise ProtocolError(
                f"{self.target} speaks protocol {welcome.protocol}, this is {PROTOCOL}; "
                "use the same version of gradwire at both ends",
                worker=self.target,
            )
        peer = PeerIdentity(welcome.peer, welcome.name, self.target)
        if self._welcomed and (welcome.peer != self.peer.id or not welcome.resumed):
            happened = "was restarted" if welcome.peer != self.peer.id else "has dropped this client's lease"
            raise WorkerLost(
                f"{self.peer} {happened}: what it held for this process is gone", worker=str(self.peer)
            )
        self.peer = peer
        self.peer_max_message_bytes = welcome.max_message_bytes
        self.peer_takes_in_flight(welcome.max_bytes_in_flight)
        self.peer_codecs = frozenset(welcome.codecs)
        self._welcomed = True
        return welcome.same_host if welcome.HasField("same_host") else None

    def _read(self, call: Any, streams: Streams) -> None:
        """Reads a stream to its end, on a thread of its own."""
        reason = "the worker closed the stream"
        try:
            for data in call:
                self.receive_or_refuse(data, streams)
        except grpc.RpcError as error:
            reason = _explain(error, 0.0)
        # One stream without the other is of no use: the keeper starts anew.
        if self._ended is None and not streams.control.closed:
            self._broke = self._broke or reason
            self._cut()

    def _lost(self, reason: str) -> GradwireError:
        if not self._welcomed:
            return ConnectFailed(
                f"no gradwire worker answered at {self.target}"
                + (f" within {self._patience:g} s" if self._tries_again else "")
                + f": {reason}",
                worker=self.target,
            )
        return WorkerLost(
            f"{self.peer} has been out of reach for {self.settings.lost_after:g} s: {reason}",
            worker=str(self.peer),
        )


def _first_frame(call: Any) -> link_pb2.Frame:
    try:
        received = frames.parse(next(call))
    except StopIteration:
        raise _Broken("the worker closed the stream at once") from None
    if len(received) != 1:
        raise ProtocolError("the other end's first message is no single frame")
    return received[0]


def _explain(error: grpc.RpcError, handshake: float) -> str:
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.CANCELLED:
        return f"there was no answer for {handshake:.1f} s"
    return f"{code.name}: {details}"
