"""Sessions with workers on other hosts go over a TCP socket beside the gRPC port, if nothing forbids it."""

from __future__ import annotations

import socket

import pytest
import torch
from tests.conformance.proxy import Proxy
from tests.integration.conftest import Launch

import gradwire as gw
import gradwire_server as gws
from gradwire.transport import GrpcStream, SocketCarrier

SERVED = """
import gradwire_server as gws

@gws.expose
def double(x):
    return 2 * x
"""


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def goes_directly(worker: gw.RemoteWorker) -> bool:
    """Whether the session goes over a TCP socket; calls the worker over it, there and back."""
    x = torch.arange(500_000, dtype=torch.float32, requires_grad=True)
    y = worker.double(x)
    y.sum().backward()
    assert torch.equal(y, 2 * x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2))
    stream = worker._link._carrier  # type: ignore[attr-defined]
    assert isinstance(stream, (GrpcStream, SocketCarrier))
    return isinstance(stream, SocketCarrier) and not stream.is_local


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_daemon_is_reached_directly(launch: Launch) -> None:
    daemon = launch(SERVED)
    with gw.connect(daemon.address, same_host=False) as worker:
        assert goes_directly(worker)


def test_either_side_can_forbid_it(launch: Launch) -> None:
    with gw.connect(launch(SERVED).address, same_host=False, direct=False) as worker:
        assert not goes_directly(worker)
    with gw.connect(launch(SERVED, "--no-direct").address, same_host=False) as worker:
        assert not goes_directly(worker)


def test_a_proxy_is_not_bypassed(launch: Launch) -> None:
    daemon = launch(SERVED)
    with Proxy(daemon.address) as proxy, gw.connect(proxy.address, same_host=False) as worker:
        assert not goes_directly(worker)


def test_the_socket_can_have_a_port_of_its_own(launch: Launch) -> None:
    port = free_port()
    daemon = launch(SERVED, "--direct-bind", f"127.0.0.1:{port}")
    with gw.connect(daemon.address, same_host=False) as worker:
        assert goes_directly(worker)
    # Somebody without a token is refused, and disturbs nobody.
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(20)
        stranger.sendall(bytes(32))
        assert stranger.recv(1) == b""
    with gw.connect(daemon.address, same_host=False) as worker:
        assert goes_directly(worker)


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        worker = gws.Worker(double, direct_bind=address)
        with pytest.raises(gws.BindFailed, match="direct") as caught:
            worker.start()
        assert caught.value.address == address


def test_an_address_that_cannot_be_reached_is_not_waited_for() -> None:
    """As with a firewall, or a container of which only the gRPC port is published."""
    with gws.Worker(double) as worker:
        listener = worker._acceptor
        listener.listen_directly()
        direct = listener._listeners["direct"]
        assert direct is not None
        host, _ = direct.address
        direct.address = (host, free_port())  # what is offered leads nowhere
        with gw.connect(worker.address, same_host=False) as handle:
            assert not goes_directly(handle)
