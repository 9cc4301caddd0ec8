"""Two processes of one host go around the network, where nothing lies between them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.faults.proxy import FaultyProxy
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE

import gradwire as gw
from gradwire.transport import direct, handshake, same_host

MIB = 1 << 20

SERVED = """
import torch
import gradwire_server as gws

@gws.expose
def double(x):
    return 2 * x

kept = []

@gws.expose
def keep(x):
    kept.append(x)
    return len(kept)
"""


def segments_of(process: int | str) -> int:
    """How many segments a process has mapped."""
    maps = Path(f"/proc/{process}/maps").read_text()
    return maps.count("/memfd:gradwire")


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_large_tensors_cross_in_memory_that_is_used_again(launch: Launch) -> None:
    daemon = launch(SERVED)
    with gw.connect(daemon.address) as worker:
        for step in range(50):
            x = torch.full((MIB,), float(step))
            assert torch.equal(worker.double(x), 2 * x)
        assert 2 <= segments_of("self") <= 8
        assert worker.traffic().total > 50 * 2 * 4 * MIB
    wait_until(lambda: segments_of("self") == 0 and segments_of(daemon.process.pid) == 0)


def test_received_tensors_stay_as_they_are(launch: Launch) -> None:
    daemon = launch(SERVED)
    with gw.connect(daemon.address) as worker:
        received = [worker.double(torch.full((MIB,), float(step))) for step in range(20)]
        received[3] += 1  # the receiver's own
        for step, y in enumerate(received):
            assert torch.equal(y, torch.full((MIB,), 2.0 * step + (step == 3)))
    # They outlive the link, too.
    assert torch.equal(received[7], torch.full((MIB,), 14.0))


def test_gradients_are_exact(launch: Launch) -> None:
    daemon = launch(SERVED)
    x = torch.rand(MIB, requires_grad=True)
    with gw.connect(daemon.address) as worker:
        for _ in range(5):
            x.grad = None
            (worker.double(x) * x).sum().backward()
            assert torch.equal(x.grad, 4 * x.detach())


def test_many_sizes_and_threads_at_once(launch: Launch) -> None:
    daemon = launch(SERVED)

    def check(number: int) -> bool:
        x = torch.full((1 + (number * 7919) % (2 * MIB),), float(number))
        return torch.equal(worker.double(x), 2 * x)

    with gw.connect(daemon.address) as worker, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(200)))


def test_off_by_either_end(launch: Launch) -> None:
    daemon, closed = launch(SERVED), launch(SERVED, "--no-same-host")
    x = torch.rand(MIB)
    with gw.connect(daemon.address, same_host=False) as worker, gw.connect(closed.address) as other:
        assert torch.equal(worker.double(x), 2 * x)
        assert torch.equal(other.double(x), 2 * x)
        assert segments_of("self") == 0


def test_not_around_a_proxy(launch: Launch) -> None:
    daemon = launch(SERVED)
    proxy = FaultyProxy(daemon.address)
    proxy.active = False
    x = torch.rand(MIB)
    with proxy.running(), gw.connect(proxy.address) as worker:
        assert torch.equal(worker.double(x), 2 * x)
        assert segments_of("self") == 0


def test_without_room_tensors_go_over_the_socket(launch: Launch) -> None:
    daemon = launch(SERVED, "--max-shared-bytes", "4MiB")
    with gw.connect(daemon.address) as worker:
        x = torch.rand(4 * MIB)
        for _ in range(3):
            assert torch.equal(worker.double(x), 2 * x)
        small = torch.rand(MIB // 2)
        assert torch.equal(worker.double(small), 2 * small)


def test_nothing_is_left_of_a_worker_that_was_killed(launch: Launch) -> None:
    daemon = launch(SERVED)
    # Long enough for a busy machine: after a cut, the network may be all that is left.
    worker = gw.connect(daemon.address, lost_after=5.0)
    kept = worker.double(torch.ones(MIB))
    assert segments_of("self") > 0
    os.kill(daemon.process.pid, signal.SIGKILL)
    with pytest.raises(gw.WorkerLost):
        worker.double(torch.ones(MIB))
    assert torch.equal(kept, torch.full((MIB,), 2.0))
    del kept
    wait_until(lambda: segments_of("self") == 0)
    worker.close()


def test_a_stopped_worker_is_lost_and_a_woken_one_is_found_again(launch: Launch) -> None:
    daemon = launch(SERVED)
    worker = gw.connect(daemon.address, lost_after=1.0)
    assert worker.double(1) == 2
    daemon.signal(signal.SIGSTOP)
    try:
        with pytest.raises(gw.WorkerLost):
            worker.double(2)
    finally:
        daemon.signal(signal.SIGCONT)
    assert worker.double(torch.ones(MIB)).sum() == 2 * MIB
    worker.close()


class Meeting:
    """A listener, as a worker has one, and what it was offered for that has been accepted."""

    def __init__(self, kind: str) -> None:
        self.family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
        self.purposes: list[object] = []
        listen = same_host.listen if kind == "unix" else partial(direct.listen, "127.0.0.1:0")
        listener = listen(self._on_handshake)
        assert listener is not None
        self.listener = listener

    def _on_handshake(self, purpose: object, connection: socket.socket) -> None:
        handshake.accept(connection)
        self.purposes.append((purpose, connection.close()))

    def new_token(self) -> bytes:
        return self.listener.new_token("purpose")

    def stranger(self) -> socket.socket:
        """A connection on which nothing has been sent."""
        connection = socket.socket(self.family)
        connection.settimeout(DEADLINE)
        connection.connect(self.listener.address)
        return connection

    def meet(self, token: bytes) -> bool:
        """Whether whoever has the token gets a connection."""
        connection = handshake.connect(self.family, self.listener.address, token, DEADLINE, target="x")
        if connection is None:
            return False
        connection.close()
        return True


@pytest.fixture(params=["unix", "tcp"])
def meeting(request: pytest.FixtureRequest) -> Iterator[Meeting]:
    meeting = Meeting(request.param)
    yield meeting
    meeting.listener.close()


def test_a_stranger_gets_nowhere(meeting: Meeting) -> None:
    token = meeting.new_token()
    with meeting.stranger() as stranger:
        stranger.sendall(bytes(len(token)))
        assert stranger.recv(1) == b""
    with meeting.stranger() as half:
        half.sendall(token[:-1])
        half.shutdown(socket.SHUT_WR)
        assert half.recv(1) == b""
    meeting.stranger().close()  # silent
    assert meeting.purposes == []
    assert meeting.meet(token)
    wait_until(lambda: meeting.purposes == [("purpose", None)])
    assert not meeting.meet(token)  # it is good once
    withdrawn = meeting.new_token()
    meeting.listener.forget(withdrawn)
    assert not meeting.meet(withdrawn)
    assert len(meeting.purposes) == 1


def test_a_worker_that_refuses_a_handshake_closes_the_connection() -> None:
    def refuse(purpose: object, connection: socket.socket) -> None:
        raise ConnectionAbortedError("the client uses the stream")

    listener = same_host.listen(refuse)
    assert listener is not None
    try:
        offer = same_host.offer(listener, listener.new_token("purpose"), "unix:")
        assert same_host.connect(offer, "unix:x", DEADLINE) is None
    finally:
        listener.close()


def test_a_client_that_hung_up_before_the_handshake_is_refused(meeting: Meeting) -> None:
    client, accepted = socket.socketpair(socket.AF_UNIX)
    client.sendall(meeting.new_token())
    client.close()
    meeting.listener._may_begin.acquire()  # as whoever accepts does
    meeting.listener._shake_hands(accepted)
    assert accepted.fileno() < 0
    assert meeting.purposes == []


OUT_OF_DESCRIPTORS = """
import errno, os, resource
import gradwire_server as gws

limits = resource.getrlimit(resource.RLIMIT_NOFILE)
filling = []

@gws.expose
def fill():
    # Leaves no descriptor for anything else to open.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, limits[1]))
    while True:
        try:
            filling.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
            return

@gws.expose
def open_descriptors():
    # Without opening one.
    return sum(is_open(number) for number in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))

def is_open(number):
    try:
        os.fstat(number)
        return True
    except OSError:
        return False

@gws.expose
def release():
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    while filling:
        os.close(filling.pop())
"""


def local_sockets_of(process: int) -> list[str]:
    """The names of the local sockets in Linux's abstract namespace that a process listens on."""
    own = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:
            continue  # closed meanwhile
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [
        fields[7].removeprefix("@")
        for fields in lines
        if fields[3] == "00010000" and f"socket:[{fields[6]}]" in own and len(fields) > 7
    ]


def test_a_worker_that_ran_out_of_descriptors_for_a_while_is_met_again(launch: Launch) -> None:
    daemon = launch(SERVED + OUT_OF_DESCRIPTORS)
    with gw.connect(daemon.address) as worker, ExitStack() as stack:
        (name,) = local_sockets_of(daemon.process.pid)
        worker.fill()
        before = worker.open_descriptors()
        # The acceptor has its next descriptor already; the one after that fails.
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0{name}")
        wait_until(lambda: worker.open_descriptors() > before)
        for _ in range(3):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(f"\0{name}")
            assert worker.double(1) == 2
        worker.release()
    with gw.connect(daemon.address) as worker:
        assert worker.double(torch.ones(MIB)).sum() == 2 * MIB
        assert segments_of("self") > 0
