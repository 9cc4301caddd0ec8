"""A TCP proxy that does to connections what networks do: cuts, resets, stalls, delays, half-closes.

Faults fire after a random number of bytes, in either direction, as the seed decides, and are counted: a test
that needs faults checks that they really happened.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["KINDS", "FaultyProxy"]

KINDS = ("cut", "reset", "stall", "delay", "half-close")
_STALL_SECONDS = 0.3
_DELAY_SECONDS = 0.05


class FaultyProxy:
    """Forwards connections to a target, and spoils them."""

    def __init__(
        self,
        target: str,
        *,
        seed: int = 0,
        kinds: Sequence[str] = KINDS,
        bytes_between: tuple[int, int] = (200, 20_000),
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self._kinds = kinds
        self._bytes_between = bytes_between
        self.fired: Counter[str] = Counter()
        """How many faults of each kind have happened."""
        self.active = True
        """While False it only forwards."""
        self.refuse = False
        """While True new connections are closed at once."""
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)

    @contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._close(server), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def cut_all(self) -> None:
        """Cuts every connection now."""
        asyncio.run_coroutine_threadsafe(self._cut_all(), self._loop).result(10)

    async def _cut_all(self) -> None:
        for connection in list(self._connections):
            connection.cancel()
        self.fired["cut"] += 1

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _close(self, server: asyncio.Server) -> None:
        server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._connect(reader, writer)
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()  # before anything is awaited: a second cancellation may come there
            await _closed(writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            return
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        ends = [writer, there_writer]
        pumps = [
            asyncio.ensure_future(self._pump(reader, there_writer, ends)),
            asyncio.ensure_future(self._pump(there_reader, writer, ends)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            there_writer.close()
            await asyncio.gather(*pumps, return_exceptions=True)
            await _closed(there_writer)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: list[asyncio.StreamWriter]
    ) -> None:
        """Forwards one direction until it ends, or a fault ends the connection."""
        until_fault = self._random.randint(*self._bytes_between)
        while data := await reader.read(65536):
            # A fault comes between any two bytes, not only between messages.
            while self.active and len(data) >= until_fault:
                writer.write(data[:until_fault])
                data = data[until_fault:]
                until_fault = self._random.randint(*self._bytes_between)
                if not await self._fault(writer, ends):
                    return
            until_fault -= len(data)
            writer.write(data)
            await writer.drain()

    async def _fault(self, writer: asyncio.StreamWriter, ends: list[asyncio.StreamWriter]) -> bool:
        """Lets something happen. Whether the connection goes on after it."""
        kind = self._random.choice(self._kinds)
        self.fired[kind] += 1
        if kind == "delay":
            await asyncio.sleep(_DELAY_SECONDS)
            return True
        if kind == "stall":
            await asyncio.sleep(_STALL_SECONDS)
            return False
        if kind == "half-close":
            writer.write_eof()
            # The other direction still flows; the one who waits for this one must notice by itself.
            await asyncio.sleep(_STALL_SECONDS)
            return False
        if kind == "reset":
            for end in ends:
                sock: socket.socket = end.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Closes a connection, and returns when nothing of it is left."""
    writer.close()
    try:
        await asyncio.wait_for(writer.wait_closed(), 5)
    except (OSError, TimeoutError):
        writer.transport.abort()
