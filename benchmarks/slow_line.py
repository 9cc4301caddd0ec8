"""A line of a given speed between two processes on this machine.

Two network namespaces with a veth pair between them, shaped both ways by tc, where that can be had (Linux,
root, iproute2). Else a proxy in this process that passes bytes on no faster than the line would.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

__all__ = ["Line", "slow_line"]

_PIECE = 64 * 1024
_ENDS = (("client", "10.231.0.1"), ("worker", "10.231.0.2"))


@dataclass(frozen=True)
class Line:
    """How the two ends are started, and how they reach each other."""

    how: str
    worker_prefix: Sequence[str]
    """What the worker's command starts with."""
    client_prefix: Sequence[str]
    worker_host: str
    """Where the worker listens."""
    megabits: float
    proxied: bool = False

    @contextmanager
    def address(self, worker: str) -> Iterator[str]:
        """Where the client finds a worker that listens at an address."""
        if not self.proxied:
            yield worker
            return
        host, _, port = worker.rpartition(":")
        with _Proxy((host, int(port)), self.megabits) as proxy:
            yield proxy


@contextmanager
def slow_line(megabits: float) -> Iterator[Line]:
    """A line for the length of a block. What it made is gone afterwards, whatever happens."""
    with ExitStack() as stack:
        try:
            line = stack.enter_context(_namespaces(megabits))
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            how = f"a throttling proxy, because namespaces cannot be had: {reason.strip()}"
            line = Line(how, (), (), "127.0.0.1", megabits, proxied=True)
        yield line


@contextmanager
def _namespaces(megabits: float) -> Iterator[Line]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise OSError("needs root, ip and tc")
    names = {end: f"gradwire-{os.getpid()}-{end}" for end, _ in _ENDS}
    with ExitStack() as stack:
        for name in names.values():
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        client, worker = names["client"], names["worker"]
        # The pair goes with the namespaces.
        _run("ip", "link", "add", "line", "netns", client, "type", "veth", "peer", "line", "netns", worker)
        for end, address in _ENDS:
            inside = ("-n", names[end])
            _run("ip", *inside, "address", "add", f"{address}/30", "dev", "line")
            for device in ("lo", "line"):
                _run("ip", *inside, "link", "set", device, "up")
            rate = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms")
            _run("tc", *inside, "qdisc", "add", "dev", "line", "root", "tbf", *rate)
        prefixes = {end: ("ip", "netns", "exec", name) for end, name in names.items()}
        how = f"two network namespaces, veth, tbf {megabits:g} Mbit/s each way"
        yield Line(how, prefixes["worker"], prefixes["client"], dict(_ENDS)["worker"], megabits)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


class _Proxy:
    """Passes connections on, all of them together no faster than the line, each way."""

    def __init__(self, target: tuple[str, int], megabits: float) -> None:
        self._target = target
        self._there, self._back = _Pace(megabits), _Pace(megabits)
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> str:
        threading.Thread(target=self._accept, daemon=True).start()
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                worker = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += (client, worker)
            for source, target, pace in ((client, worker, self._there), (worker, client, self._back)):
                threading.Thread(target=_pass_on, args=(source, target, pace), daemon=True).start()


class _Pace:
    """When the next bytes may go."""

    def __init__(self, megabits: float) -> None:
        self._seconds_per_byte = 8e-6 / megabits
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size * self._seconds_per_byte
            pause = self._free_at - time.monotonic()
        time.sleep(max(pause, 0.0))


def _pass_on(source: socket.socket, target: socket.socket, pace: _Pace) -> None:
    try:
        while data := source.recv(_PIECE):
            pace.wait(len(data))
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # an end has gone
