"""Values that stay on a worker: who holds them, how they travel, and when they go."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import wait as futures_wait
from functools import partial
from typing import Any

import pytest
import torch
from tests.training import models
from tests.training.conftest import HERE, Served, wait_until

import gradwire as gw
import gradwire_server as gws

X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)


class TestResultsThatStay:
    def test_are_fetched_with_gradients_flowing(self, a: Served) -> None:
        x = X.clone().requires_grad_()
        ref = a.handle.remote("square", x)
        fetched = ref.fetch()
        assert torch.equal(fetched, X * X)
        fetched.sum().backward()
        assert torch.equal(x.grad, 2 * X)

    def test_arrive_as_the_value_on_their_own_worker(self, a: Served) -> None:
        x = X.clone().requires_grad_()
        ref = a.handle.remote("square", x)
        a.handle.square(ref).sum().backward()
        assert torch.allclose(x.grad, 4 * X**3)
        assert a.handle.kind_of(ref) == "Tensor"

    def test_records_and_plain_values_are_fetched_as_what_they_are(self, a: Served) -> None:
        gw.register_type(models.Setting)
        assert a.handle.remote("make_setting").fetch() == models.Setting("width", 3)
        assert a.handle.remote("nothing").fetch() is None
        first, second = a.handle.remote("nothing"), a.handle.remote("nothing")
        first.delete()
        assert second.fetch() is None  # equal values are not one object

    def test_errors_name_what_was_called(self, a: Served) -> None:
        with pytest.raises(gw.UnknownFunction):
            a.handle.remote("no_such")


class TestObjects:
    def test_methods_run_there_and_keep_state(self, a: Served) -> None:
        notebook = a.handle.create("Notebook")
        assert isinstance(notebook, gw.RemoteRef)
        assert (notebook.write("one"), notebook.write(line="two")) == (1, 2)
        assert notebook.read() == ["one", "two"]
        assert notebook.call("read") == notebook.call_async("read").result()
        with pytest.raises(AttributeError, match="no method 'erase'"):
            notebook.erase()
        assert "write" in dir(notebook)
        assert "Notebook" in repr(notebook)
        assert "write" in repr(notebook.write)

    def test_travel_as_themselves_to_their_worker_and_as_handles_to_others(
        self, a: Served, b: Served
    ) -> None:
        layer = a.handle.create("Layer", 4, seed=5)
        assert a.handle.is_layer(layer)
        assert not b.handle.is_layer(layer)
        assert b.handle.kind_of(layer) == "RemoteRef"

    def test_a_worker_calls_what_lives_on_another_and_gradients_flow(self, a: Served, b: Served) -> None:
        layer = a.handle.create("Layer", 4, seed=5)
        whole = models.Layer(4, seed=5)
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        out, expected = b.handle.call_it(layer, x), whole(y) * 3
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
        assert torch.allclose(x.grad, y.grad)
        opt.step()
        torch.optim.SGD(whole.parameters(), lr=0.1).step()
        assert torch.allclose(layer.state_dict()["weight"], whole.weight)

    def test_what_is_returned_by_another_worker_still_belongs_to_its_own(self, a: Served, b: Served) -> None:
        layer = a.handle.create("Layer", 4)
        for _ in range(3):
            passed_on = b.handle.echo(layer)
            assert torch.equal(passed_on(X), layer(X))
            del passed_on
        a.handle.kind_of(1)  # carries releases, if there are any
        assert torch.is_tensor(layer(X))


class TestLettingGo:
    def test_the_last_handle_lets_go_of_it(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        again = layer.itself()
        assert again.ref._message.ref == layer.ref._message.ref
        del layer
        assert a.handle.kind_of(1) == "int"  # carries the release
        assert torch.is_tensor(again(X))
        del again
        assert wait_until(lambda: a.objects == 0)

    def test_letting_go_of_one_twice_leaves_the_others(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        again = layer.itself()
        for _ in range(2):
            layer.ref.__del__()
            a.handle.kind_of(1)  # carries the release
        assert torch.is_tensor(again(X))
        assert a.objects == 1

    def test_a_call_that_cannot_be_sent_releases_what_it_was_to_carry(
        self, a: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layers = [a.handle.create("Layer", 4) for _ in range(3)]
        assert a.objects == 3

        def fail(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(gw.wire.Encoder, "finish", fail)
            del layers
            with pytest.raises(MemoryError):
                a.handle.kind_of(1)
        assert wait_until(lambda: a.objects == 0)

    @pytest.mark.parametrize("how", ["too large", "cannot travel", "cannot be encoded"])
    def test_a_reply_that_cannot_be_sent_keeps_nothing(
        self, a: Served, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Local:
            pass

        def fail(*_: object) -> None:
            raise MemoryError

        if how == "too large":
            with pytest.raises(gw.ResourceExhausted, match="exceeds the limit"):
                a.handle.layer_with(size=65 << 20)
        elif how == "cannot travel":
            monkeypatch.setattr(models, "bytes", lambda size: Local(), raising=False)
            with pytest.raises(gw.Unencodable):
                a.handle.layer_with()
        else:
            is_ours = threading.get_ident()
            finish = gw.wire.Encoder.finish
            monkeypatch.setattr(
                gw.wire.Encoder,
                "finish",
                lambda self: finish(self) if threading.get_ident() == is_ours else fail(),
            )
            with pytest.raises(gw.GradwireError):
                a.handle.layer_with()
        assert wait_until(lambda: a.objects == 0)

    def test_a_result_that_nobody_reads_keeps_nothing(self, a: Served) -> None:
        futures = [a.handle.call_async("layer_with"), a.handle.call_async("Layer", 4)]
        assert futures_wait(futures, 20).not_done == set()
        assert a.objects == 3
        del futures
        assert wait_until(lambda: a.objects == 0)

    def test_a_ref_is_never_handed_out_to_what_is_just_being_dropped(self, a: Served) -> None:
        """The last other ref goes at each moment at which it can: when the lock of the objects is free."""
        release = a.worker._peer.engine.container.release
        for moment in range(1, 12):
            layer = a.handle.create("Layer", 4)
            ids: list[Any] = []
            layer.ref._releases = ids  # what its destructor would tell the worker
            layer.ref.__del__()
            layer.ref._releases = None
            lock = _LockWithGaps(a.worker._objects._lock, moment, partial(release, ids))
            a.worker._objects._lock = lock  # type: ignore[assignment]
            try:
                again = layer.itself()
            except gw.NotFound:
                assert moment == 1  # it went before the call found it
            else:
                assert torch.is_tensor(again(X)), moment
            finally:
                a.worker._objects._lock = lock.lock
            del layer
        assert lock.gaps < moment  # there are no further moments

    def test_results_go_with_their_refs(self, a: Served) -> None:
        refs = [a.handle.remote("square", X.clone().requires_grad_()) for _ in range(5)]
        assert a.objects == 5
        del refs
        assert wait_until(lambda: a.objects == 0)
        assert wait_until(lambda: not a.handle._shared_link.engine.container._arguments)

    def test_named_ones_stay(self, a: Served) -> None:
        a.handle.create("Layer", 4, name="stays")
        a.handle.kind_of(1)
        assert a.objects == 1
        a.handle.get("stays").delete()
        assert a.objects == 0

    def test_a_client_that_is_killed_takes_its_own_with_it_and_leaves_the_named(self) -> None:
        with gws.Worker(models, lease=0.3) as worker, gw.connect(worker.address) as handle:
            a = Served(worker, handle)
            script = f"""
import torch, gradwire as gw
worker = gw.connect({worker.address!r})
mine, ours = worker.create("Layer", 4), worker.create("Layer", 4, name="ours")
opt = gw.optim.DistributedOptimizer(torch.optim.Adam, [mine, ours], lr=0.1)
(mine(torch.ones(1, 4).double()) + ours(torch.ones(1, 4).double())).sum().backward()
print("ready", flush=True)
input()
"""
            client = subprocess.Popen(
                [sys.executable, "-c", script], cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            try:
                assert client.stdout is not None
                assert client.stdout.readline() == b"ready\n"
                assert a.objects == 3
                assert a.contexts >= 1
                client.send_signal(signal.SIGKILL)
                client.wait(20)
                assert wait_until(lambda: a.objects == 1)
                assert wait_until(lambda: not any(c.gradients() for c in _contexts(worker)))
                assert torch.is_tensor(handle.get("ours")(X))
            finally:
                client.kill()
                client.communicate()

    def test_a_client_cannot_delete_what_another_made(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        from gradwire.peers.local import LocalPeer
        from gradwire.runtime.scope import Scope, entered

        stranger = LocalPeer("stranger")
        try:
            with entered(Scope(peer=stranger)), gw.connect(a.worker.address) as handle:
                with pytest.raises(gw.PermissionDenied, match="another client"):
                    handle.call("gradwire.delete", layer.ref._message.peer.id, layer.ref._message.ref, "")
        finally:
            stranger.close()
        assert torch.is_tensor(layer(X))
        layer.delete()
        with pytest.raises(gw.NotFound, match="deleted"):
            layer(X)
        assert a.objects == 0

    def test_one_that_fails_to_close_keeps_no_other(self, a: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: object) -> None:
            raise ValueError("no")

        monkeypatch.setattr(models.Layer, "gradwire_close", fail, raising=False)
        layers = [a.handle.create("Layer", 4) for _ in range(3)]
        assert a.objects == 3
        del layers
        assert wait_until(lambda: a.objects == 0)

    def test_a_program_ends_quietly_with_handles_still_open(self, a: Served) -> None:
        script = f"""
import torch, gradwire as gw
worker = gw.connect({a.worker.address!r})
layer, ref = worker.create("Layer", 4), worker.remote("square", torch.ones(2))
opt = gw.optim.DistributedOptimizer(torch.optim.Adam, [layer], lr=0.1)
class Circle: pass
circle = Circle(); circle.me = circle; circle.held = (layer, ref, opt)
"""
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert wait_until(lambda: a.objects == 0)


class _LockWithGaps:
    """A lock. When it was let go of for the nth time, something happens before anybody goes on."""

    def __init__(self, lock: Any, moment: int, act: Callable[[], object]) -> None:
        self.lock = lock
        self.gaps = 0
        self._moment = moment
        self._act = act

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.gaps += 1
        act = self.gaps == self._moment
        self.lock.release()
        if act:
            self._act()


def _contexts(worker: gws.Worker) -> list[gw.autograd.DistAutogradContext]:
    return worker._peer.engine.container.contexts()


def test_an_error_of_a_method_keeps_nothing_of_its_caller(a: Served) -> None:
    class Local:
        pass

    def fail(act: Callable[[], object]) -> weakref.ref[Local]:
        local = Local()  # in a frame that the error's traceback has
        with pytest.raises(gw.GradwireError):
            act()
        return weakref.ref(local)

    notebook = a.handle.create("Notebook")
    gc.collect()
    gc.disable()
    try:
        for act in (
            lambda: a.handle.create("NoSuchClass"),
            lambda: a.handle.remote("no_such_function"),
            lambda: notebook.call("no_such_method"),
            lambda: notebook(1),
            lambda: notebook.write(1, 2, 3, 4),
        ):
            assert fail(act)() is None
    finally:
        gc.enable()
