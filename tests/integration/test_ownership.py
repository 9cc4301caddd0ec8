"""What a peer made belongs to it: another peer finds nothing under its ids, and cannot take its place."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.integration.test_hostile import RawLink, hello_frame, peer_of, request

import gradwire as gw
import gradwire_server as gws
from gradwire import wire
from gradwire.api.refs import message_of
from gradwire.peers.current import default_peer
from gradwire.proto.v1 import autograd_pb2, link_pb2
from gradwire.transport import OwnIdentity, frames
from gradwire_server.serving.acceptor import SessionAcceptor

Code = link_pb2.Error
weight = torch.ones(3, requires_grad=True)


@gws.expose
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * weight


@pytest.fixture
def worker() -> Iterator[gws.Worker]:
    with gws.Worker(scale, Counter) as worker:
        yield worker


@pytest.fixture
def owner(worker: gws.Worker) -> Iterator[Any]:
    with gw.connect(worker.address) as handle:
        yield handle


def ask(stranger: RawLink, method: int, message: Any, id: int = 1) -> link_pb2.Response:
    stranger.send(request(id, message.SerializeToString(), method))
    return stranger.respond()


def guesses(number: int) -> list[tuple[int, int]]:
    """The number of an id, which can be counted, with keys that a stranger may try."""
    return [(number, key) for key in (0, 1, 2**64 - 1, random.getrandbits(64))]


def test_another_peer_cannot_propagate_gradients_to_its_results(worker: gws.Worker, owner: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    loss = owner.scale(x).sum()
    (sent,) = worker._peer.engine.container._results.values()
    with RawLink(worker.address).welcome() as stranger:
        for index, (number, key) in enumerate(guesses(sent.id.number)):
            message = autograd_pb2.PropagateGradientsRequest()
            sent.context.write(message.context)
            message.gradients.message.peer, message.gradients.message.number = sent.id.peer, number
            message.gradients.message.key = key
            response = ask(stranger, link_pb2.METHOD_PROPAGATE_GRADIENTS, message, index + 1)
            assert response.error.code == Code.CODE_NOT_FOUND
    loss.backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_another_peer_cannot_release_what_it_keeps(worker: gws.Worker, owner: Any) -> None:
    counter = owner.create("Counter")
    loss = owner.scale(torch.ones(3, requires_grad=True)).sum()
    (sent,) = worker._peer.engine.container._results.values()
    message = autograd_pb2.CleanupContextRequest()
    for number, key in guesses(sent.id.number):
        message.messages.add(peer=sent.id.peer, number=number, key=key)
    message.messages.add(peer=sent.id.peer, number=message_of(counter).ref)
    with RawLink(worker.address).welcome() as stranger:
        response = ask(stranger, link_pb2.METHOD_CLEANUP_CONTEXT, message)
    assert not autograd_pb2.CleanupContextResponse.FromString(response.body).found
    loss.backward()
    assert counter.add(1) == 1


def test_another_peer_cannot_call_its_objects(worker: gws.Worker, owner: Any) -> None:
    counter = owner.create("Counter")
    own = message_of(counter)
    encoder = wire.Encoder(attach_from=None)
    with RawLink(worker.address).welcome() as stranger:
        for index, ref in enumerate((1, 2, own.ref - 1, own.ref ^ 1, random.getrandbits(64))):
            message = autograd_pb2.ForwardWithAutogradRequest(function="add")
            message.args.append(encoder.value(1, "number"))
            message.target.CopyFrom(own)
            message.target.ref = ref
            response = ask(stranger, link_pb2.METHOD_FORWARD_WITH_AUTOGRAD, message, index + 1)
            assert response.error.code == Code.CODE_NOT_FOUND
    assert counter.add(1) == 1


def test_its_objects_have_no_numbers_that_can_be_counted(owner: Any) -> None:
    refs = sorted(message_of(owner.create("Counter")).ref for _ in range(20))
    assert min(later - ref for ref, later in itertools.pairwise(refs)) > 2**32


def test_another_peer_cannot_declare_its_passes_over(worker: gws.Worker, owner: Any) -> None:
    """A call says which passes of its context's owner are over. That counts in this very context alone."""
    x = torch.ones(3, requires_grad=True)
    loss = owner.scale(x).sum()
    with RawLink(worker.address).welcome() as stranger:
        for index in range(3):  # a context in the owner's name is there from the second call on
            encoder = wire.Encoder(attach_from=None)
            message = autograd_pb2.ForwardWithAutogradRequest(function="scale")
            message.args.append(encoder.value(torch.ones(3, requires_grad=True), "x"))
            table, _ = encoder.finish()
            message.tensors.CopyFrom(table)
            message.autograd.context.peer = message.autograd.message.peer = default_peer().identity.id
            message.autograd.message.number = index + 1
            message.autograd.oldest_pass = 2**63
            assert not ask(stranger, link_pb2.METHOD_FORWARD_WITH_AUTOGRAD, message, index + 1).error.code
        loss.backward()
    assert torch.equal(x.grad, torch.ones(3))


@pytest.mark.parametrize("secret", [b"", bytes(32)], ids=["none", "another"])
def test_a_stranger_who_knows_its_id_is_refused(worker: gws.Worker, owner: Any, secret: bytes) -> None:
    hello = hello_frame(peer=default_peer().identity.id, secret=secret)
    with RawLink(worker.address, frames.envelope(hello)) as stranger:
        assert stranger.farewell().code == Code.CODE_PERMISSION_DENIED
    assert owner.scale(torch.ones(3)).sum() == 3


def test_a_stranger_who_knows_its_session_is_refused(worker: gws.Worker, owner: Any) -> None:
    session = owner._link._session_id
    with RawLink(worker.address, frames.envelope(hello_frame(session=session, attempt=9))).welcome():
        assert owner.scale(torch.ones(3)).sum() == 3
        assert len(worker._acceptor.sessions) == 2  # it got one of its own


def test_the_id_is_a_hash_of_the_secret() -> None:
    identity = OwnIdentity.new("somebody")
    assert identity.id == peer_of(identity.secret)
    assert identity.secret.hex() not in repr(identity)
    assert identity.secret != identity.proof_key


def test_a_worker_with_the_id_of_another_is_refused(
    worker: gws.Worker, owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second worker that claims to be the first would get what is meant for that one."""
    welcome = SessionAcceptor._welcome
    pretended = worker._peer.identity

    def lie(self: SessionAcceptor, *args: Any, **more: Any) -> bytes:
        (frame,) = frames.parse(welcome(self, *args, **more))
        frame.welcome.peer = pretended.id
        return frames.envelope(frame)

    with gws.Worker(scale) as liar:
        monkeypatch.setattr(SessionAcceptor, "_welcome", lie)
        with pytest.raises(gw.PermissionDenied, match="claims to be another worker"):
            gw.connect(liar.address)
    monkeypatch.undo()
    assert owner.scale(torch.ones(3)).sum() == 3


def test_a_worker_stays_the_same_over_all_its_addresses() -> None:
    with gws.Worker(scale, bind=["127.0.0.1:0", "127.0.0.1:0"]) as worker:
        with gw.connect(worker.addresses[0]) as one, gw.connect(worker.addresses[1]) as other:
            assert one.scale(torch.ones(3)).sum() == other.scale(torch.ones(3)).sum() == 3


def test_neither_logs_nor_errors_hand_on_the_key_of_an_id(owner: Any) -> None:
    with gw.context() as context:
        shown = f"{context} {context._id!r}"
        assert str(context._id.key) not in shown
        assert f"{context._id.key:x}" not in shown


def add_to(counter: Any, number: int) -> int:
    return int(counter.add(number))


def connect(address: str) -> None:
    gw.connect(address)


@pytest.mark.parametrize("follow", [["*"], ["127.0.0.1:*"], ["localhost:1", "{address}"]], ids=str)
def test_a_ref_leads_a_worker_where_it_may_go(worker: gws.Worker, owner: Any, follow: list[str]) -> None:
    allowed = [pattern.format(address=worker.address) for pattern in follow]
    counter = owner.create("Counter")
    with gws.Worker(add_to, follow=allowed) as other, gw.connect(other.address) as handle:
        assert handle.add_to(counter, 5) == 5


@pytest.mark.parametrize("follow", [[], ["10.0.0.*:50051"], ["127.0.0.1"], ["*:1"], ["127.0.0.?:*"]], ids=str)
def test_a_ref_leads_a_worker_nowhere_else(worker: gws.Worker, owner: Any, follow: list[str]) -> None:
    counter = owner.create("Counter")
    with gws.Worker(add_to, follow=follow) as other, gw.connect(other.address) as handle:
        before = len(worker._acceptor.sessions)
        with pytest.raises(gw.PermissionDenied, match=f"does not connect to {worker.address}.*--follow"):
            handle.add_to(counter, 5)
        assert len(worker._acceptor.sessions) == before
    assert counter.add(0) == 0


def test_a_ref_leads_a_worker_where_its_own_code_goes(worker: gws.Worker, owner: Any) -> None:
    counter = owner.create("Counter")
    with gws.Worker(add_to, connect) as other, gw.connect(other.address) as handle:
        handle.call("connect", worker.address)
        assert handle.add_to(counter, 5) == 5
