"""Everything that is held for a client goes with its lease."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from tests.faults.proxy import FaultyProxy
from tests.faults.test_deaths import SERVED, wait_for
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE

import gradwire as gw
import gradwire_server as gws
from gradwire import wire
from gradwire.api.workers import RemoteWorker
from gradwire.autograd.contexts import DistAutogradContext
from gradwire.peers.current import default_peer
from gradwire.peers.local import LocalPeer
from gradwire.proto.v1 import autograd_pb2, value_pb2
from gradwire.transport import LinkSettings
from gradwire.wire.ids import AutogradMessageId, ContextId

# Forking a process that has loaded torch, but has not used gRPC yet, makes many real clients cheap.
CLIENTS = """
import os, signal, sys
import torch
import gradwire as gw
import gradwire._public  # all of it, before there are many

torch.set_num_threads(1)
address, count = sys.argv[1], int(sys.argv[2])
for _ in range(count):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        worker = gw.connect(address)
        x = torch.ones(2000, dtype=torch.float64, requires_grad=True)
        results = [worker.scale_any(x * i) for i in range(3)]
        layer, kept = worker.create("Layer"), worker.remote("echo", x)
        with gw.context() as ctx:
            inside = worker.scale_any(x)
            os.write(writer, b"holding")
            signal.pause()
    os.close(writer)
    assert os.read(reader, 7) == b"holding"
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print("done")
"""

SERVED_ANY = (
    SERVED
    + """
@gws.expose
def scale_any(x):
    return x * weight[0]
"""
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_worker_is_where_it_started_after_killing_many_clients(
    launch: Launch, tmp_path: Path, killed: int
) -> None:
    daemon = launch(SERVED_ANY, "--lease", "1", "--lost-after", "2")
    script = tmp_path / "clients.py"
    script.write_text(textwrap.dedent(CLIENTS))

    def kill(count: int) -> None:
        command = [sys.executable, str(script), daemon.address, str(count)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert ran.stdout == "done\n", ran.stderr

    with gw.connect(daemon.address) as worker:

        def idle() -> bool:
            held = worker.inspect()
            return not held.contexts and len(held.clients) == 1

        kill(20)
        wait_for(idle, "the first leases running out")
        before = worker.inspect().resident_bytes
        kill(killed)
        wait_for(idle, "the leases running out")
        after = worker.inspect().resident_bytes
    # Each held some 100 kB: a tenth of what a leak of all would come to.
    assert after - before < 4_000_000 + killed * 100_000 / 10


def test_a_client_that_comes_back_in_time_finds_everything_as_it_left_it(launch: Launch) -> None:
    daemon = launch(SERVED_ANY, "--lease", "20")
    with FaultyProxy(daemon.address, kinds=("delay",)).running() as proxy:
        proxy.active = False
        with gw.connect(proxy.address, lost_after=20.0) as worker:
            x = torch.ones(3, dtype=torch.float64, requires_grad=True)
            layer = worker.create("Layer")
            loss = layer(worker.scale(x)).sum()
            for _ in range(3):
                proxy.cut_all()
                worker.ping(DEADLINE)
            loss.backward()
            assert torch.equal(x.grad, torch.ones(3).double())
            assert layer.num_parameters() == 3


def test_a_client_that_comes_back_too_late_is_told(launch: Launch) -> None:
    daemon = launch(SERVED_ANY, "--lease", "0.2")
    with FaultyProxy(daemon.address, kinds=("delay",)).running() as proxy:
        proxy.active = False
        worker = gw.connect(proxy.address, lost_after=20.0)
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        loss = worker.scale(x).sum()
        proxy.refuse = True
        proxy.cut_all()
        # A node of its own: this one's lease would run on with any link of it.
        observer = LocalPeer("observer")
        other = RemoteWorker(observer.shared_link_to(daemon.address, LinkSettings()), "observer")
        wait_for(lambda: len(other.inspect().clients) == 1, "the lease running out")
        observer.close()
        proxy.refuse = False
        started = time.monotonic()
        with pytest.raises(gw.WorkerLost):
            loss.backward()
        assert time.monotonic() - started < DEADLINE
        worker.scale(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(3).double())


class KeptResult:
    """Something that stays on a worker."""

    def number(self) -> int:
        return 7


def test_objects_of_clients_without_a_link_go_when_they_are_not_used() -> None:
    lease = 3.0  # longer than a busy machine may keep this process from running
    with gws.Worker(KeptResult, lease=lease) as worker, grpc.insecure_channel(worker.address) as channel:
        forward = channel.unary_unary("/gradwire.v1.Worker/ForwardWithAutograd")

        def call(function: str, target: value_pb2.RemoteRef | None = None) -> value_pb2.Value:
            request = autograd_pb2.ForwardWithAutogradRequest(function=function, target=target)
            response = forward(request.SerializeToString(), timeout=DEADLINE)
            return autograd_pb2.ForwardWithAutogradResponse.FromString(response).result

        ref = call("KeptResult").ref
        # Longer than the lease, since it is used.
        until = time.monotonic() + 1.5 * lease
        while time.monotonic() < until:
            assert call("number", ref).integer == 7
        wait_for(lambda: not worker._objects.counts.total, "the lease running out")
        with pytest.raises(grpc.RpcError, match="its lease ran out"):
            call("number", ref)


def test_refs_in_a_reply_that_nobody_waits_for_are_released() -> None:
    started, go_on = threading.Event(), threading.Event()

    def make() -> list[KeptResult]:
        started.set()
        assert go_on.wait(DEADLINE)
        return [KeptResult(), KeptResult()]

    with gws.Worker(make, KeptResult) as worker, gw.connect(worker.address) as handle:
        future = handle.call_async("make")
        assert started.wait(DEADLINE)
        assert future.cancel()
        wait_for(lambda: handle.inspect().calls == 1, "the cancellation coming in")
        go_on.set()
        wait_for(lambda: handle.inspect().calls == 0, "the call ending")
        wait_for(lambda: not worker._objects.counts.total, "the refs being released")
        # As they are when they are read and dropped.
        assert len(handle.make()) == 2
        wait_for(lambda: not worker._objects.counts.total, "the refs being dropped")


class Chain:
    """Workers a, b and c. The program calls a, a calls b, and b calls c, which makes contexts on b."""

    def __init__(self) -> None:
        self.workers: dict[str, gws.Worker] = {}
        self.before_b_returns: Callable[[], None] = lambda: None

    def call_b(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = gw.connect(self.workers["b"].address).call_c(x)
        return result

    def call_c(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = gw.connect(self.workers["c"].address).triple(x)
        self.before_b_returns()
        return result

    def call_b_without_gradients(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = gw.connect(self.workers["b"].address).call_c_with_gradients(x)
        return result

    def call_c_with_gradients(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return self.call_c(x.clone().requires_grad_())

    def triple(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def let_leases_run_out(self) -> None:
        for worker in self.workers.values():
            worker._peer.engine.leases.sweep(0.0)

    def contexts_on(self, name: str) -> list[DistAutogradContext]:
        return self.workers[name]._peer.engine.container.contexts()


@pytest.fixture
def chain() -> Iterator[Chain]:
    made = Chain()
    with (
        gws.Worker(made.triple) as c,
        gws.Worker(made.call_c, made.call_c_with_gradients) as b,
        gws.Worker(made.call_b, made.call_b_without_gradients) as a,
    ):
        made.workers.update(a=a, b=b, c=c)
        yield made


@pytest.mark.parametrize("opens_context", [False, True])
def test_the_lease_does_not_end_a_context_that_came_to_be_in_a_request_which_still_runs(
    chain: Chain, opens_context: bool
) -> None:
    chain.before_b_returns = chain.let_leases_run_out
    x = torch.ones(2, requires_grad=True)
    with gw.connect(chain.workers["a"].address) as worker:
        if opens_context:
            with gw.context() as context:
                context.backward(worker.call_b(x).sum())
                found = context.gradients()[x]
        else:
            worker.call_b(x).sum().backward()
            assert x.grad is not None
            found = x.grad
    assert torch.equal(found, torch.full((2,), 3.0))


def test_the_lease_does_not_end_a_context_while_a_peer_that_made_a_request_in_it_is_linked(
    chain: Chain,
) -> None:
    with gw.connect(chain.workers["a"].address) as worker, gw.context():
        worker.call_b(torch.ones(2))  # no message is kept: b only remembers that c knows the context
        (context,) = chain.contexts_on("b")
        assert context.peers == {chain.workers["a"]._peer.identity.id}
        chain.let_leases_run_out()
        assert chain.contexts_on("b") == [context]
    wait_for(lambda: not chain.contexts_on("b"), "a's word that it has ended")


def test_a_context_stays_if_its_owner_closes_a_link_during_a_request_of_another_peer(chain: Chain) -> None:
    direct = gw.connect(chain.workers["b"].address)
    direct.ping(DEADLINE)
    peer_of_b = chain.workers["b"]._peer

    def close() -> None:
        direct.close()
        wait_for(lambda: peer_of_b.find_link(default_peer().identity.id) is None, "the link being closed")

    chain.before_b_returns = close
    x = torch.ones(2, requires_grad=True)
    with gw.connect(chain.workers["a"].address) as worker:
        worker.call_b(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_the_lease_ends_a_context_if_nobody_will_say_that_it_has_ended(chain: Chain) -> None:
    """A peer that calls with gradients off does not remember whom it took the context to."""
    with gw.connect(chain.workers["a"].address) as worker:
        with torch.no_grad(), gw.context():
            worker.call_b_without_gradients(torch.ones(2))
        assert chain.contexts_on("b")
        chain.let_leases_run_out()
        assert not chain.contexts_on("b")


def test_the_lease_does_not_end_a_context_that_came_to_be_in_a_unary_request(chain: Chain) -> None:
    chain.before_b_returns = chain.let_leases_run_out
    encoder = wire.Encoder(attach_from=None)
    request = autograd_pb2.ForwardWithAutogradRequest(function="call_c")
    request.args.append(encoder.value(torch.ones(2, requires_grad=True), "x"))
    table, _ = encoder.finish()
    request.tensors.CopyFrom(table)
    ContextId(77, 5, 6).write(request.autograd.context)
    AutogradMessageId(77, 1, 2).write(request.autograd.message)
    with grpc.insecure_channel(chain.workers["b"].address) as channel:
        forward = channel.unary_unary("/gradwire.v1.Worker/ForwardWithAutograd")
        response = forward(request.SerializeToString(), timeout=DEADLINE)
        assert autograd_pb2.ForwardWithAutogradResponse.FromString(response).HasField("autograd")
        assert chain.contexts_on("b")
        chain.let_leases_run_out()  # now that nothing is served
        assert not chain.contexts_on("b")
