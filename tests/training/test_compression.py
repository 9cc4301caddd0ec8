"""Compression between real ends: what is chosen is what happens, and training stands it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
import torch

import gradwire as gw
import gradwire_server as gws
from gradwire import wire
from gradwire.autograd.feedback import CallSite, ErrorFeedback
from gradwire.peers.current import default_peer
from gradwire.proto.v1 import autograd_pb2, tensor_pb2, worker_pb2_grpc
from gradwire.wire import codecs

SIZE = 64 * 64 * 4
"""Bytes of every tensor here that is compressed."""

weight = torch.linspace(-1, 1, 64 * 64).reshape(64, 64).clone().requires_grad_()


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def layer(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def hidden(x: torch.Tensor) -> torch.Tensor:
    """A result that depends on integers and on small tensors, too."""
    return x * 3


class Net(torch.nn.Module):
    def __init__(self, width: int = 64, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Linear(64, width)
        self.second = torch.nn.Linear(width, 64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


@pytest.fixture
def server() -> Iterator[gws.Worker]:
    with gws.Worker(twice, layer, hidden, Net) as worker:
        yield worker


def random(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


def saved_by(worker: gw.RemoteWorker, forward: str | None, backward: str | None) -> tuple[int, int]:
    """Bytes spared in the forward and in the backward of one call."""
    x = random().requires_grad_()
    before = worker.traffic().saved
    with gw.compression(forward, backward):
        y = worker.twice(x)
    between = worker.traffic().saved
    y.backward(random(1))
    after = worker.traffic().saved
    return between - before, after - between


INT8_SAVES = SIZE - (SIZE // 4 + 64 * 64 // 256 * 4)


def test_forward_and_backward_are_chosen_apart_and_saved_bytes_are_counted(server: gws.Worker) -> None:
    with gw.connect(server.address) as worker:
        assert saved_by(worker, None, None) == (0, 0)
        # Arguments and results; gradients there and back.
        assert saved_by(worker, "bf16", None) == (SIZE, 0)
        assert saved_by(worker, None, "fp16") == (0, SIZE)
        assert saved_by(worker, "fp16", "int8") == (SIZE, 2 * INT8_SAVES)
        assert saved_by(worker, "int8", None) == (2 * INT8_SAVES, 0)
        # What was saved did not cross, and the worker counts the same.
        traffic = worker.traffic()
        client = worker.inspect().clients[0]
        assert client.saved_bytes == traffic.saved == 2 * SIZE + SIZE + 4 * INT8_SAVES
        # Each end counts its own hello, and what is on its way.
        assert abs(client.sent_bytes - traffic.received) < 500
        assert abs(client.received_bytes - traffic.sent) < 500


def test_compression_makes_the_traffic_smaller_by_what_it_says(server: gws.Worker) -> None:
    def cost(backward: str | None) -> tuple[int, int]:
        with gw.connect(server.address, compress=gw.Compression(backward=backward)) as worker:
            y = worker.twice(random().requires_grad_())
            before = worker.traffic()
            y.backward(random(1))
            after = worker.traffic()
        return after.total - before.total, after.saved - before.saved

    plain, nothing = cost(None)
    compressed, saved = cost("int8")
    assert nothing == 0
    assert saved == 2 * INT8_SAVES
    assert abs(plain - compressed - saved) < 400


def test_a_block_overrides_the_handle_and_is_over_after_it(server: gws.Worker) -> None:
    with gw.connect(server.address, compress=gw.Compression(forward="bf16")) as worker:
        assert not torch.equal(worker.twice(random()), 2 * random())
        with gw.compression():
            assert torch.equal(worker.twice(random()), 2 * random())
            with gw.compression("zstd"):
                assert torch.equal(worker.twice(random()), 2 * random())
        assert torch.equal(worker.twice(random()), 2 * random().bfloat16().float())


def test_gradients_are_those_of_what_was_computed(server: gws.Worker) -> None:
    """Straight through: rounding has the derivative 1."""
    x = random().requires_grad_()
    with gw.connect(server.address, compress=gw.Compression(forward="bf16")) as worker:
        y = worker.layer(x)
        y.backward(random(1))
    rounded = random().bfloat16().float().requires_grad_()
    expected = layer(rounded)
    assert torch.equal(y, expected.bfloat16().float())
    expected.backward(random(1))
    assert torch.equal(x.grad, rounded.grad)


def test_small_tensors_and_integers_arrive_as_they_are(server: gws.Worker) -> None:
    with gw.connect(server.address, compress=gw.Compression("int8", "int8")) as worker:
        small = torch.randn(1000)
        assert torch.equal(worker.hidden(small), 3 * small)
        integers = torch.arange(10_000)
        assert torch.equal(worker.hidden(integers), 3 * integers)
        assert worker.traffic().saved == 0


def test_state_and_arguments_of_constructors_are_never_rounded(server: gws.Worker) -> None:
    with gw.connect(server.address, compress=gw.Compression("int8", "int8")) as worker:
        module = worker.create("Net", 128)
        exact = Net(128).state_dict()
        assert all(torch.equal(value, exact[name]) for name, value in module.state_dict().items())
        other = Net(128, seed=1).state_dict()
        module.load_state_dict(other)
        assert all(torch.equal(value, other[name]) for name, value in module.state_dict().items())
        optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [module], lr=0.01)
        module(random()).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        before = worker.traffic().saved
        optimizer.load_state_dict(state)
        again = optimizer.state_dict()
        assert worker.traffic().saved == before
        assert str(again) == str(state)
        assert worker.traffic().saved > 0


# -- negotiation


def test_a_worker_that_lacks_a_codec_is_found_out_when_connecting(server: gws.Worker) -> None:
    acceptor = server._acceptor
    acceptor._settings = replace(acceptor._settings, codecs=(tensor_pb2.CODEC_BF16,))
    with gw.connect(server.address, compress=gw.Compression("bf16")) as worker:
        worker.twice(random())
        assert worker.traffic().saved == SIZE
        with gw.compression(backward="int8"), pytest.raises(gw.CodecUnavailable, match="int8"):
            worker.twice(random())
        assert torch.equal(worker.twice(torch.ones(2)), 2 * torch.ones(2))
    with pytest.raises(gw.CodecUnavailable, match="zstd") as caught:
        gw.connect(server.address, compress=gw.Compression("zstd"))
    assert server.name in str(caught.value)


def test_gradients_go_as_they_are_to_one_who_does_not_take_the_codec(server: gws.Worker) -> None:
    with gw.connect(server.address, compress=gw.Compression(backward="int8")) as worker:
        x = random().requires_grad_()
        y = worker.twice(x)
        worker._link.peer_codecs = frozenset()
        y.backward(random(1))
        # The contributions were asked for.
        assert worker.traffic().saved == INT8_SAVES


def test_without_the_package_zstd_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("zstandard")

    monkeypatch.setattr(codecs, "_zstandard", missing)
    codecs.supported_codecs.cache_clear()
    try:
        with pytest.raises(gw.CodecUnavailable, match=r"gradwire\[zstd\]"):
            gw.Compression("zstd")
        assert tensor_pb2.CODEC_ZSTD not in codecs.supported_codecs()
        assert wire.find_codec(tensor_pb2.CODEC_ZSTD) is None
    finally:
        monkeypatch.undo()
        codecs.supported_codecs.cache_clear()


def test_a_codec_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="fp16, bf16, int8, zstd"):
        gw.Compression("mp3")


@pytest.mark.parametrize("forward", [tensor_pb2.CODEC_NONE, tensor_pb2.CODEC_INT8, 99])
def test_a_unary_client_sends_what_it_likes_and_gets_what_it_asks_for(
    server: gws.Worker, forward: int
) -> None:
    encoder = wire.Encoder(attach_from=None, codec=wire.find_codec(tensor_pb2.CODEC_BF16))
    request = autograd_pb2.ForwardWithAutogradRequest(function="twice")
    request.args.append(encoder.value(random(), "x"))
    request.tensors.CopyFrom(encoder.finish()[0])
    if forward:
        request.compression.forward = forward  # type: ignore[assignment]
    with grpc.insecure_channel(server.address) as channel:
        response = worker_pb2_grpc.WorkerStub(channel).ForwardWithAutograd(request, timeout=30)
    is_encoded = response.tensors.storages[0].WhichOneof("content") == "encoded"
    assert is_encoded == (forward == tensor_pb2.CODEC_INT8)
    result = wire.Decoder(response.tensors).value(response.result)
    assert torch.allclose(result, 2 * random(), atol=0.1)


# -- error feedback


def kept_here() -> ErrorFeedback:
    return default_peer().engine.feedback


def gradients_of_steps(worker: gw.RemoteWorker, steps: int, **options: bool) -> torch.Tensor:
    total = torch.zeros(64, 64)
    for _ in range(steps):
        x = random().requires_grad_()
        with gw.compression(backward="int8", **options):
            y = worker.twice(x)
        y.backward(random(1))
        total += x.grad
    return total


def test_errors_do_not_add_up_over_steps(server: gws.Worker) -> None:
    exact = 2 * 30 * random(1)
    step = 2 * float(random(1).abs().max()) / 127
    with gw.connect(server.address) as worker:
        fed_back = gradients_of_steps(worker, 30)
        assert kept_here().bytes == SIZE
        assert server._peer.engine.feedback.bytes == SIZE
        # One rounding is owed here and one there, however many steps there were.
        assert (fed_back - exact).abs().max() <= 1.2 * step
        worker.forget_error_feedback()
        assert kept_here().bytes == server._peer.engine.feedback.bytes == 0
        assert (gradients_of_steps(worker, 30, error_feedback=False) - exact).abs().max() > 5 * step
        assert kept_here().bytes == server._peer.engine.feedback.bytes == 0


def test_feedback_is_of_one_place_and_off_for_gradients_of_gradients(server: gws.Worker) -> None:
    with gw.connect(server.address, compress=gw.Compression(backward="int8")) as worker:
        x = random().requires_grad_()
        worker.twice(x).backward(random(1))
        worker.layer(x).backward(random(1))
        module, other = worker.create("Net"), worker.create("Net")
        module(x).backward(random(1))
        other(x).backward(random(1))
        assert kept_here().bytes == 4 * SIZE
        (gradient,) = torch.autograd.grad(worker.hidden(x), x, random(1), create_graph=True)
        assert kept_here().bytes == 4 * SIZE
        assert torch.allclose(gradient, 3 * random(1), atol=0.1)
    # What was owed to a worker goes with the link to it.
    assert kept_here().bytes == 0


def place(slot: int) -> CallSite:
    return CallSite(1, 2, 0, slot, (1000,), (1,), torch.float32)


def test_what_is_kept_for_feedback_is_bounded_and_the_longest_unused_goes() -> None:
    feedback = ErrorFeedback(max_bytes=10_000)
    for slot in range(3):
        feedback.put(place(slot), torch.full((1000,), float(slot)))
    assert feedback.bytes == 8000
    assert feedback.take(place(0)) is None
    feedback.put(place(1), torch.ones(1000))
    both = feedback.take(place(1))
    assert both is not None
    assert torch.equal(both, torch.full((1000,), 2.0))  # two were on their way
    feedback.put(place(9), torch.ones(100_000))
    assert feedback.bytes == 0
    feedback.put(place(1), torch.ones(1000))
    feedback.forget(peer=7)
    assert feedback.bytes == 4000
    feedback.forget(peer=1)
    assert feedback.bytes == 0


# -- training


def train(worker: gw.RemoteWorker, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A small model of which the middle is on the worker."""
    generator = torch.Generator().manual_seed(3)
    before = Net(seed=4)
    middle = worker.create("Net", seed=5)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [before, middle], lr=0.05)
    teacher = Net(seed=6)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 64, generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(middle(before(x)), teacher(x).detach())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {**before.state_dict(), **{f"middle.{k}": v for k, v in middle.state_dict().items()}}


def test_training_with_zstd_is_equal_to_training_without(server: gws.Worker) -> None:
    with gw.connect(server.address) as worker:
        losses, state = train(worker, 10)
    with gw.connect(server.address, compress=gw.Compression("zstd", "zstd")) as worker:
        same_losses, same_state = train(worker, 10)
        assert worker.traffic().saved > 0
    assert losses == same_losses
    assert all(torch.equal(value, same_state[name]) for name, value in state.items())


def accuracy_on_digits(worker: gw.RemoteWorker) -> float:
    """Digits, split: features here, the middle on the worker, the last layer here."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    before, middle = Net(seed=1), worker.create("Net", 96, seed=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        last = torch.nn.Linear(64, 10)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [before, middle, last], lr=3e-3)
    for _ in range(12):
        for start in range(0, 1400, 100):
            optimizer.zero_grad()
            batch = slice(start, start + 100)
            out = last(torch.relu(middle(torch.relu(before(x[batch])))))
            torch.nn.functional.cross_entropy(out, y[batch]).backward()
            optimizer.step()
    with torch.no_grad(), gw.compression():
        predicted = last(torch.relu(middle(torch.relu(before(x[1400:]))))).argmax(1)
    return float((predicted == y[1400:]).float().mean())


def test_training_with_int8_gradients_comes_out_as_well(server: gws.Worker) -> None:
    found = {}
    for backward in (None, "int8"):
        with gw.connect(server.address, compress=gw.Compression(backward=backward)) as worker:
            found[backward] = accuracy_on_digits(worker)
            assert (worker.traffic().saved > 0) == (backward is not None)
    assert found[None] > 0.94
    assert abs(found["int8"] - found[None]) <= 0.02, found


# -- reports


def test_codec_error_tells_how_far_off_a_codec_is(server: gws.Worker) -> None:
    with gw.connect(server.address) as worker:
        inputs = [random().requires_grad_()]
        for codec, low, high in (("zstd", 0.0, 0.0), ("bf16", 1e-4, 1e-2), ("int8", 1e-3, 5e-2)):
            report = gw.codec_error(worker.twice, inputs, gw.Compression(codec, codec))
            assert [row.tensor for row in report.rows] == ["result 0", "gradient of input 0"]
            for row in report.rows:
                assert low <= row.relative_error <= high
                assert (row.largest_error > 0) == (codec != "zstd")
                assert row.bytes == SIZE
            assert str(report).count("\n") == 2
        forward_only = gw.codec_error(worker.twice, inputs, gw.Compression(forward="int8"))
        assert forward_only.rows[0].relative_error > 0
        assert forward_only.rows[1].relative_error == 0
