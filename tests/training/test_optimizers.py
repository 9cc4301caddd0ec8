"""The distributed optimizer: the same as one process, and made everywhere or nowhere."""

from __future__ import annotations

import copy
import math
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import models
from tests.training.conftest import Launch, Served, same, wait_until
from torch import nn

import gradwire as gw
import gradwire.training.distributed_step
import gradwire.training.stepping
from gradwire.api import calls
from gradwire.training.distributed_step import DistributedStep
from gradwire_server.objects.optimizers import WorkerOptimizer

X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)
State = dict[str, torch.Tensor]


class Trained:
    """A model over two workers and this process beside the same one whole, trained alike."""

    def __init__(self, a: Served, b: Served, optimizer_class: Any = torch.optim.SGD, **options: Any) -> None:
        self.split = nn.Sequential(
            models.Layer(4, seed=1), a.handle.create("Layer", 4, seed=2), b.handle.create("Layer", 4, seed=3)
        )
        self.whole = nn.Sequential(*(models.Layer(4, seed=seed) for seed in (1, 2, 3)))
        self.settings = {
            key: options.pop(key) for key in ("skip_nonfinite", "allow_missing") if key in options
        }
        self.opt = gw.optim.DistributedOptimizer(optimizer_class, [self.split], **self.settings, **options)
        self.plain = optimizer_class(self.whole.parameters(), **options)

    def backward(self, x: torch.Tensor = X) -> None:
        for model in (self.split, self.whole):
            model(x).pow(2).sum().backward()

    def step(self, x: torch.Tensor = X) -> None:
        for optimizer in (self.opt, self.plain):
            optimizer.zero_grad()
        self.backward(x)
        for optimizer in (self.opt, self.plain):
            optimizer.step()

    @property
    def agrees(self) -> bool:
        return same(self.split.state_dict(), self.whole.state_dict())


def refuse(opt: gw.optim.DistributedOptimizer, model: nn.Module) -> gw.StepRefused:
    """Steps in vain; nothing must have changed anywhere."""
    before = model.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    with pytest.raises(gw.StepRefused) as caught:
        opt.step()
    assert same(model.state_dict(), before)
    return caught.value


class TestTheSameAsOneProcess:
    @pytest.mark.parametrize(
        ("optimizer_class", "options"),
        [
            (torch.optim.SGD, {"lr": 0.1}),
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
            (torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.99), "amsgrad": True}),
            (torch.optim.AdamW, {"lr": 0.05}),
            (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
            (torch.optim.Adagrad, {"lr": 0.1}),
            (torch.optim.Adadelta, {}),
            (torch.optim.NAdam, {}),
            (torch.optim.Rprop, {}),
        ],
        ids=lambda value: value.__name__ if isinstance(value, type) else None,
    )
    def test_bit_for_bit_over_many_steps(
        self, a: Served, b: Served, optimizer_class: type, options: dict[str, Any]
    ) -> None:
        trained = Trained(a, b, optimizer_class, **options)
        for step in range(12):
            trained.step(X + step / 10)
        assert trained.agrees

    def test_parameter_groups(self, a: Served, b: Served) -> None:
        split = [models.Layer(4, seed=1), a.handle.create("Layer", 4, seed=2), b.handle.create("Layer", 4)]
        whole = [models.Layer(4, seed=1), models.Layer(4, seed=2), models.Layer(4)]
        opt = gw.optim.DistributedOptimizer(
            torch.optim.SGD,
            [{"params": split[:2], "lr": 0.1}, {"params": split[2], "momentum": 0.9}],
            lr=0.01,
        )
        plain = torch.optim.SGD(
            [
                {"params": [*whole[0].parameters(), *whole[1].parameters()], "lr": 0.1},
                {"params": whole[2].parameters(), "momentum": 0.9},
            ],
            lr=0.01,
        )
        for _ in range(4):
            for layers, optimizer in ((split, opt), (whole, plain)):
                optimizer.zero_grad()
                layers[2](layers[1](layers[0](X))).sum().backward()
                optimizer.step()
                optimizer.param_groups[1]["lr"] *= 0.5
        assert all(
            same(one.state_dict(), other.state_dict()) for one, other in zip(split, whole, strict=True)
        )

    def test_parameters_may_be_given_as_to_torch(self, a: Served) -> None:
        model, whole = nn.Sequential(a.handle.create("Layer", 4), models.Layer(4)), models.Layer(4)
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
        model[0](X).sum().backward()
        opt.step()
        whole(X).sum().backward()
        torch.optim.SGD(whole.parameters(), lr=0.1).step()
        assert same(model[0].state_dict(), whole.state_dict())

    @pytest.mark.parametrize(
        "schedule",
        [
            lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5),
            lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=20),
            lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
            lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5),
            lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, threshold=1e9),
        ],
        ids=["StepLR", "OneCycleLR", "LambdaLR", "CosineAnnealingLR", "ReduceLROnPlateau"],
    )
    def test_learning_rates_are_scheduled(
        self, a: Served, b: Served, schedule: Callable[[torch.optim.Optimizer], Any]
    ) -> None:
        trained = Trained(a, b, torch.optim.AdamW, lr=0.1)
        schedules = [schedule(trained.opt), schedule(trained.plain)]
        rates = set()
        for _ in range(6):
            trained.step()
            for one in schedules:
                one.step(*([1.0] if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            rates.add(trained.opt.param_groups[0]["lr"])
            assert trained.opt.param_groups[0]["lr"] == trained.plain.param_groups[0]["lr"]
        assert len(rates) > 1
        assert trained.agrees

    def test_state_goes_there_and_back(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, torch.optim.Adam, lr=0.1)
        for _ in range(3):
            trained.step()
        other = Trained(a, b, torch.optim.Adam, lr=0.7)
        other.split.load_state_dict(trained.split.state_dict())
        other.whole.load_state_dict(trained.whole.state_dict())
        other.opt.load_state_dict(copy.deepcopy(trained.opt.state_dict()))
        other.plain.load_state_dict(trained.plain.state_dict())
        for _ in range(3):
            other.step()
        assert other.agrees
        assert other.opt.param_groups[0]["lr"] == 0.1
        with pytest.raises(ValueError, match="other workers or groups"):
            other.opt.load_state_dict({"param_groups": [], "local": None, "remote": []})

    @pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
    @pytest.mark.parametrize("max_norm", [0.01, 1e6])
    def test_gradients_are_clipped_by_one_norm_over_all(
        self, a: Served, b: Served, norm_type: float, max_norm: float
    ) -> None:
        trained = Trained(a, b, lr=0.1)
        trained.backward()
        norm = trained.opt.clip_grad_norm_(max_norm, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(trained.whole.parameters(), max_norm, norm_type)
        assert math.isclose(norm, expected, rel_tol=1e-12)
        trained.opt.step()
        trained.plain.step()
        for one, other in zip(
            trained.split.state_dict().values(), trained.whole.state_dict().values(), strict=True
        ):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("norm_type", [2.0, math.inf])
    def test_a_norm_that_is_not_finite_is_not_overlooked(
        self, a: Served, b: Served, norm_type: float
    ) -> None:
        trained = Trained(a, b, lr=0.1, skip_nonfinite=True)
        trained.backward(X * math.nan)
        with pytest.raises(RuntimeError, match="norm"):
            trained.opt.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
        assert math.isnan(trained.opt.clip_grad_norm_(1.0, norm_type))
        assert refuse(trained.opt, trained.split).reason == "nonfinite"
        with pytest.raises(ValueError, match="norm_type"):
            trained.opt.clip_grad_norm_(1.0, 0)

    def test_gradients_accumulate_until_they_are_zeroed(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, lr=0.1)
        for _ in range(2):
            for part in range(3):
                trained.backward(X + part)
            trained.opt.step()
            trained.plain.step()
            trained.opt.zero_grad()
            trained.plain.zero_grad()
        assert trained.agrees

    def test_contexts_are_stepped_apart_and_leave_grad_alone(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, torch.optim.Adam, lr=0.1)
        for _ in range(3):
            with gw.context() as one, gw.context() as other:
                one.backward(trained.split(X).pow(2).sum())
                with gw.context():
                    other.backward(trained.split(X).sum())
                trained.opt.clip_grad_norm_(1e6, context=one)
                trained.opt.step(one)
            trained.plain.zero_grad()
            trained.whole(X).pow(2).sum().backward()
            trained.plain.step()
        assert all(p.grad is None for p in trained.split[0].parameters())
        assert trained.agrees
        assert refuse(trained.opt, trained.split).reason == "missing"  # .grad of plain backward: none

    def test_clipping_a_context_leaves_others_alone(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, lr=0.1)
        trained.backward()
        with gw.context() as context:
            context.backward(trained.split(X).pow(2).sum())
            norm = trained.opt.clip_grad_norm_(0.01, context=context)
            assert math.isclose(trained.opt.clip_grad_norm_(1e6, context=context), 0.01, rel_tol=1e-3)
        assert math.isclose(trained.opt.clip_grad_norm_(1e6), norm, rel_tol=1e-12)

    def test_sparse_gradients(self, a: Served) -> None:
        remote, here, whole = a.handle.create("Table"), models.Table(), [models.Table(), models.Table()]
        opt = gw.optim.DistributedOptimizer(torch.optim.SparseAdam, [remote, here], lr=0.1)
        plain = torch.optim.SparseAdam([p for table in whole for p in table.parameters()], lr=0.1)
        for step in range(4):
            index = torch.tensor([step, 1, 1])
            for tables, optimizer in (([remote, here], opt), (whole, plain)):
                optimizer.zero_grad()
                sum(table(index).pow(2).sum() for table in tables).backward()
                optimizer.step()
        assert same(remote.state_dict(), whole[0].state_dict())
        assert same(here.state_dict(), whole[1].state_dict())
        assert opt.clip_grad_norm_(1e9) > 0


class TestWhatIsGivenToIt:
    def test_an_optimizer_of_the_users_own_is_the_one_that_the_worker_exposes(self, a: Served) -> None:
        up, down = a.handle.create("Layer", 4), a.handle.create("Layer", 4)
        gw_up = gw.optim.DistributedOptimizer(models.Uphill, [up], lr=0.1)
        # The worker also exposes a class of its own as "Adam"; torch's is torch's.
        gw_down = gw.optim.DistributedOptimizer(torch.optim.Adam, [down], lr=0.1)
        whole_up, whole_down = models.Layer(4), models.Layer(4)
        for module, optimizer in (
            (up, gw_up),
            (down, gw_down),
            (whole_up, models.Uphill(whole_up.parameters(), lr=0.1)),
            (whole_down, torch.optim.Adam(whole_down.parameters(), lr=0.1)),
        ):
            module(X).sum().backward()
            optimizer.step()
        assert same(up.state_dict(), whole_up.state_dict())
        assert same(down.state_dict(), whole_down.state_dict())

    def test_one_that_the_worker_does_not_know_is_refused(self, a: Served) -> None:
        class Mine(torch.optim.SGD):
            pass

        layer = a.handle.create("Layer", 4)
        with pytest.raises(gw.WrongArguments, match="Mine"):
            gw.optim.DistributedOptimizer(Mine, [layer], lr=0.1)

    def test_what_cannot_work_is_refused_at_once(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        make = gw.optim.DistributedOptimizer
        with pytest.raises(ValueError, match="no parameters"):
            make(torch.optim.SGD, [], lr=0.1)
        with pytest.raises(TypeError, match="neither"):
            make(torch.optim.SGD, ["layer"], lr=0.1)  # type: ignore[list-item]
        with pytest.raises(TypeError, match="LBFGS"):
            make(torch.optim.LBFGS, [layer], lr=0.1)
        with pytest.raises(ValueError, match="learning rate"):
            make(torch.optim.SGD, [layer], lr=-1.0)
        with pytest.raises(TypeError):
            make(torch.optim.SGD, [layer], no_such_option=1)
        with pytest.raises((gw.WrongArguments, ValueError), match="more than one parameter group"):
            make(torch.optim.SGD, [{"params": layer}, {"params": [layer]}], lr=0.1)
        opt = make(torch.optim.SGD, [layer], lr=0.1)
        with pytest.raises(TypeError, match="closure"):
            opt.step(lambda: 0.0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="state_dict"):
            copy.deepcopy(opt)

    def test_a_module_that_comes_twice_is_stepped_once(self, a: Served) -> None:
        a.handle.create("Layer", 4, name="twice")
        handles = [a.handle.get("twice"), a.handle.get("twice")]
        local = models.Layer(4)
        opt = gw.optim.DistributedOptimizer(
            torch.optim.SGD, [*handles, nn.Sequential(local, handles[0]), local], lr=0.1, momentum=0.9
        )
        whole = models.Layer(4)
        plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            opt.zero_grad()
            plain.zero_grad()
            handles[1](X).sum().backward()
            whole(X).sum().backward()
            opt.step()
            plain.step()
        assert same(handles[0].state_dict(), whole.state_dict())

    def test_handles_with_links_of_their_own_are_one_worker(self, a: Served) -> None:
        with gw.connect(a.worker.address, lost_after=7.0) as other:
            assert other._shared_link is not a.handle._shared_link
            one, two = a.handle.create("Layer", 4, name="n"), other.create("Layer", 4, seed=2)
            opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [one, two, other.get("n")], lr=0.1)
            assert len(opt._remote) == 1
            two(one(X)).sum().backward()
            opt.step()

    def test_modules_without_parameters_do_no_harm(self, a: Served, b: Served) -> None:
        layer, nothing = a.handle.create("Layer", 4), b.handle.create("Nothing")
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer, nothing], lr=0.1)
        nothing(layer(X)).sum().backward()
        opt.step()

    def test_hooks_run_around_a_step(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
        seen: list[str] = []
        opt.register_step_pre_hook(lambda *_: seen.append("before"))
        opt.register_step_post_hook(lambda *_: seen.append("after"))
        layer(X).sum().backward()
        opt.step()
        assert seen == ["before", "after"]
        assert "1 modules on" in repr(opt)

    def test_only_local_parameters_work_as_well(self) -> None:
        layer, whole = models.Layer(4), models.Layer(4)
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
        for module, optimizer in ((layer, opt), (whole, torch.optim.SGD(whole.parameters(), lr=0.1))):
            module(X).sum().backward()
            optimizer.step()
        assert same(layer.state_dict(), whole.state_dict())


class TestAllOrNothing:
    def test_missing_gradients_name_the_worker(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, lr=0.1)
        trained.split[1](trained.split[0](X)).sum().backward()  # b has no part in it
        refused = refuse(trained.opt, trained.split)
        assert refused.reason == "missing"
        assert refused.worker == b.worker.address
        assert b.worker.address in str(refused)
        assert a.worker.address not in str(refused)

    def test_missing_gradients_can_be_allowed(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, lr=0.1, allow_missing=True)
        for model in (trained.split, trained.whole):
            model[1](model[0](X)).sum().backward()
        trained.opt.step()
        trained.plain.step()
        assert trained.agrees

    @pytest.mark.parametrize("place", [0, 1, 2], ids=["here", "on a", "on b"])
    def test_gradients_that_are_not_finite_name_worker_and_parameter(
        self, a: Served, b: Served, place: int
    ) -> None:
        trained = Trained(a, b, torch.optim.Adam, lr=0.1, skip_nonfinite=True)
        trained.step()
        trained.opt.zero_grad()
        sum(layer(X).sum() for layer in trained.split).backward()
        (trained.split[place](X).sum() * math.inf).backward()
        refused = refuse(trained.opt, trained.split)
        assert refused.reason == "nonfinite"
        assert "weight" in str(refused)
        where = ["in this process", a.worker.address, b.worker.address][place]
        assert where in str(refused)
        trained.opt.zero_grad()
        trained.plain.zero_grad()
        trained.backward()
        trained.opt.step()
        trained.plain.step()
        assert trained.agrees  # the state of the optimizers was not touched, either

    @pytest.mark.parametrize("place", [0, 1], ids=["here", "on a"])
    def test_what_an_optimizer_cannot_do_is_known_before_anybody_steps(
        self, a: Served, b: Served, place: int
    ) -> None:
        tables = [models.Table(), a.handle.create("Table")]
        model = nn.Sequential(tables[place], b.handle.create("Layer", 4))
        opt = gw.optim.DistributedOptimizer(torch.optim.Adam, [model], lr=0.1)  # takes no sparse gradients
        (model[0](torch.tensor([1])).sum() + model[1](X).sum()).backward()
        refused = refuse(opt, model)
        assert refused.reason == "error"
        assert "sparse" in str(refused)

    def test_parameters_that_changed_their_type_since_backward_are_refused(
        self, a: Served, b: Served
    ) -> None:
        trained = Trained(a, b, lr=0.1)
        trained.backward()
        trained.split[2].float()
        assert "changed since backward" in str(refuse(trained.opt, trained.split))

    def test_a_worker_that_died_is_named_and_nobody_steps(self, a: Served, daemon: Launch) -> None:
        process = daemon()
        with gw.connect(process.address, lost_after=3.0) as handle:
            dying, other, here = handle.create("Layer", 4), a.handle.create("Layer", 4), models.Layer(4)
            opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [dying, other, here], lr=0.1)
            here(other(dying(X))).sum().backward()
            process.signal(signal.SIGKILL)
            process.wait()
            refused = refuse(opt, nn.Sequential(other, here))
            assert refused.reason == "lost"
            assert refused.worker == process.address
            assert isinstance(refused.__cause__, gw.LinkError)
            # Nobody waits for what the others had prepared.
            alone = gw.optim.DistributedOptimizer(torch.optim.SGD, [other], lr=0.1)
            other(X).sum().backward()
            alone.step()

    def test_a_death_between_yes_and_commit_says_who_has_stepped(
        self, a: Served, daemon: Launch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        process = daemon()
        with gw.connect(process.address, lost_after=3.0) as handle:
            dying, other, here = handle.create("Layer", 4), a.handle.create("Layer", 4), models.Layer(4)
            opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [dying, other, here], lr=0.1)
            here(other(dying(X))).sum().backward()
            commit = DistributedStep._commit

            def die_first(step: DistributedStep) -> None:
                process.signal(signal.SIGKILL)
                process.wait()
                commit(step)

            monkeypatch.setattr(DistributedStep, "_commit", die_first)
            before = {key: value.clone() for key, value in here.state_dict().items()}
            with pytest.raises(gw.StepTorn, match=f"made on {a.worker.address}") as caught:
                opt.step()
            assert caught.value.made == (a.worker.address,)
            assert caught.value.unknown + caught.value.failed == (process.address,)
            assert caught.value.worker == process.address
            assert isinstance(caught.value.__cause__, gw.LinkError)
            assert same(here.state_dict(), before)

    def test_a_prepare_that_fails_lets_go_of_the_others(
        self, a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trained = Trained(a, b, lr=0.1)
        trained.backward()
        prepare = WorkerOptimizer.prepare
        failing = [True]

        def fail_on_b(self: WorkerOptimizer, *args: Any) -> None:
            if self._objects is b.worker._objects and failing[0]:
                raise OSError("the disk is full")
            prepare(self, *args)

        monkeypatch.setattr(WorkerOptimizer, "prepare", fail_on_b)
        refused = refuse(trained.opt, trained.split)
        assert refused.reason == "error"
        assert "the disk is full" in str(refused)
        assert refused.worker == b.worker.address
        failing[0] = False
        trained.opt.step()
        trained.plain.step()
        assert trained.agrees

    def test_a_deadline_ends_a_step_before_it_is_decided_or_not_at_all(
        self, a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trained = Trained(a, b, lr=0.1)
        trained.backward()
        before = {key: value.clone() for key, value in trained.split.state_dict().items()}
        arrived, go_on = threading.Event(), threading.Event()
        prepare = WorkerOptimizer.prepare

        def late(self: WorkerOptimizer, *args: Any) -> None:
            if self._objects is b.worker._objects and not go_on.is_set():
                arrived.set()
                assert go_on.wait(20)
            prepare(self, *args)

        monkeypatch.setattr(WorkerOptimizer, "prepare", late)
        with gw.timeout(0.3), pytest.raises(gw.StepRefused) as caught:
            trained.opt.step()
        assert isinstance(caught.value.__cause__, gw.DeadlineExceeded)
        assert arrived.wait(20)
        go_on.set()  # it arrives after all; nobody may wait for it
        assert wait_until(lambda: b.worker._scheduler.unfinished == 0)
        assert same(trained.split.state_dict(), before)
        with gw.timeout(20):
            trained.opt.step()
        trained.plain.step()
        assert trained.agrees

    @pytest.mark.parametrize("count", [1, 2])
    def test_an_interrupt_does_not_tear_a_step(
        self, a: Served, b: Served, monkeypatch: pytest.MonkeyPatch, count: int
    ) -> None:
        trained = Trained(a, b if count == 2 else a, lr=0.1)
        trained.backward()
        method = "commit" if count == 2 else "step"
        make = getattr(WorkerOptimizer, method)

        def interrupt(self: WorkerOptimizer, *args: Any) -> None:
            signal.raise_signal(signal.SIGINT)  # in the middle of it: the main thread waits for the response
            make(self, *args)

        monkeypatch.setattr(WorkerOptimizer, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            trained.opt.step()
        trained.plain.step()
        assert trained.agrees

    @pytest.mark.parametrize("count", [1, 2])
    def test_a_step_that_is_interrupted_at_any_moment_is_made_everywhere_or_nowhere(
        self, a: Served, b: Served, count: int
    ) -> None:
        main, handler = threading.get_ident(), signal.getsignal(signal.SIGINT)
        for tenths_of_milliseconds in range(40):
            trained = Trained(a, b if count == 2 else a, lr=0.1)
            trained.backward()
            before = {key: value.clone() for key, value in trained.split.state_dict().items()}
            timer = threading.Timer(
                tenths_of_milliseconds / 10_000, lambda: signal.pthread_kill(main, signal.SIGINT)
            )
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - at any moment of this
                timer.start()
                trained.opt.step()
                threading.Event().wait(20)
            timer.join()
            assert signal.getsignal(signal.SIGINT) is handler
            trained.plain.step()
            assert trained.agrees or same(trained.split.state_dict(), before)


class TestLostAnswers:
    """The link is lost between a step and its answer."""

    @pytest.mark.parametrize("is_made", [True, False], ids=["made", "not made"])
    def test_a_worker_that_lives_says_whether_it_stepped(
        self, a: Served, monkeypatch: pytest.MonkeyPatch, is_made: bool
    ) -> None:
        layer, here, whole = a.handle.create("Layer", 4, name="lasting"), models.Layer(4), models.Layer(4)
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer, here], lr=0.1, momentum=0.9)
        plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
        step = WorkerOptimizer.step
        link = a.handle._link

        def lose(self: WorkerOptimizer, *args: Any) -> None:
            if is_made:
                step(self, *args)
            link.abort(gw.WorkerLost("cut"))
            if not is_made:
                assert wait_until(lambda: self._aborted_up_to >= 1)
                step(self, *args)  # too late: its trainer has been told that it was not made

        monkeypatch.setattr(WorkerOptimizer, "step", lose)
        for module in (layer, here, whole):
            module(X).sum().backward()
        if is_made:
            opt.step()
            plain.step()
        else:
            refused = refuse(opt, nn.Sequential(layer, here))
            assert isinstance(refused.__cause__, gw.WorkerLost)
        assert same(layer.state_dict(), whole.state_dict())
        assert same(here.state_dict(), whole.state_dict())
        monkeypatch.setattr(WorkerOptimizer, "step", step)
        for optimizer in (opt, plain):
            optimizer.zero_grad()
        for module in (layer, here, whole):
            module(X).sum().backward()
        opt.step()
        plain.step()
        assert same(layer.state_dict(), whole.state_dict())
        assert same(here.state_dict(), whole.state_dict())

    def test_a_worker_that_dies_leaves_it_open(self, a: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gradwire.training.distributed_step, "_OUTCOME_SECONDS", 0.5)
        layer, here = a.handle.create("Layer", 4), models.Layer(4)
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer, here], lr=0.1)

        def lose(*_: Any) -> None:
            raise gw.WorkerLost("cut")

        here(layer(X)).sum().backward()
        before = {key: value.clone() for key, value in here.state_dict().items()}
        monkeypatch.setattr(calls.CallFuture, "result", lose)
        monkeypatch.setattr(opt._remote[0], "start_creating", lambda **_: lose)
        with pytest.raises(gw.StepTorn, match="maybe made") as caught:
            opt.step()
        assert caught.value.unknown == (a.worker.address,)
        assert caught.value.made == caught.value.failed == ()
        assert same(here.state_dict(), before)

    def test_an_optimizer_that_fails_in_the_middle_tears_the_step(
        self, a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trained = Trained(a, b, lr=0.1)
        trained.backward()
        step = torch.optim.SGD.step

        def fail_on_b(self: torch.optim.SGD, *args: Any) -> Any:
            if any(one._optimizer is self for one in b.worker._objects.optimizers):
                raise OSError("out of luck")
            return step(self, *args)

        monkeypatch.setattr(torch.optim.SGD, "step", fail_on_b)
        with pytest.raises(gw.StepTorn, match="out of luck") as caught:
            trained.opt.step()
        assert caught.value.made == (a.worker.address,)
        assert caught.value.failed == (b.worker.address,)
        assert f"made in part on {b.worker.address}" in str(caught.value)
        assert "not made" not in str(caught.value)
        (failed,) = (one for one in b.worker._objects.optimizers if one._half_made)
        with pytest.raises(gw.StepTorn, match="in the middle of this step"):
            failed.commit(failed._half_made)  # a second commit does not say that the step was made

    @pytest.mark.parametrize("count", [0, 1, 2])
    @pytest.mark.parametrize(
        "error",
        [
            gw.StepRefused("of another optimizer"),
            gw.NotFound("of a nested call"),
            gw.Unavailable("the worker that gets the metrics is shutting down"),
            gw.WorkerLost("the one that gets the metrics"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_what_an_optimizer_raises_after_a_change_is_no_word_that_nothing_was_done(
        self, a: Served, b: Served, monkeypatch: pytest.MonkeyPatch, error: gw.GradwireError, count: int
    ) -> None:
        """On the last of so many workers, or in this process."""
        layers = [served.handle.create("Layer", 4, seed=1) for served in (a, b)[:count]] or [models.Layer(4)]
        before = [{key: value.clone() for key, value in layer.state_dict().items()} for layer in layers]
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, layers, lr=0.1)
        nn.Sequential(*layers)(X).sum().backward()
        step = torch.optim.SGD.step
        fails = [one._optimizer for one in (a, b)[count - 1].worker._objects.live_optimizers()]
        steps = 0

        def step_and_fail(self: torch.optim.SGD, *args: Any) -> Any:
            nonlocal steps
            steps += 1
            step(self, *args)
            if not count or any(self is one for one in fails):
                if isinstance(error, gw.StepRefused):
                    error.reason = "busy"  # after which a step is tried again
                raise error

        # The dry run, too, makes a step.
        monkeypatch.setattr(gradwire.training.stepping.DryRun, "refusal", lambda *_: None)
        monkeypatch.setattr(torch.optim.SGD, "step", step_and_fail)
        with pytest.raises(gw.StepTorn, match=f"{type(error).__name__}: {error}") as caught:
            opt.step()
        assert steps == max(count, 1)  # each once
        assert not any(same(layer.state_dict(), old) for layer, old in zip(layers, before, strict=True))
        addresses = [served.worker.address for served in (a, b)[:count]]
        assert caught.value.made == tuple(addresses[:-1])
        assert caught.value.failed == tuple(addresses[-1:])
        assert "not made" not in str(caught.value)

    def test_what_failed_before_the_step_is_known_not_to_be_made(
        self, a: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layer = a.handle.create("Layer", 4)
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
        layer(X).sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr(WorkerOptimizer, "_check", lambda *_: 1 / 0)
            assert "ZeroDivisionError" in str(refuse(opt, layer))
        opt.step()


class TestRoundTrips:
    def test_all_workers_are_asked_at_once(
        self, a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trained = Trained(a, b, lr=0.1)
        meeting = threading.Barrier(2)
        for name in ("zero_grad", "prepare", "commit", "sum_of_powers", "scale_gradients", "state_dict"):
            method = getattr(WorkerOptimizer, name)

            def together(self: WorkerOptimizer, *args: Any, method: Any = method) -> Any:
                meeting.wait(20)  # the other worker must be asked before this one has answered
                return method(self, *args)

            monkeypatch.setattr(WorkerOptimizer, name, together)
        trained.opt.zero_grad()
        trained.backward()
        trained.opt.clip_grad_norm_(0.1)
        trained.opt.step()
        trained.opt.state_dict()

    def test_one_worker_takes_one_request_and_several_two_each(
        self, a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        start_call = calls.start_call

        def counting(link: Any, function: str, *args: Any, **options: Any) -> Any:
            asked.append(function)
            return start_call(link, function, *args, **options)

        layer = a.handle.create("Layer", 4)
        alone = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer, models.Layer(4)], lr=0.1)
        trained = Trained(a, b, lr=0.1)
        layer(X).sum().backward()
        trained.backward()
        monkeypatch.setattr(calls, "start_call", counting)
        alone.step()
        assert asked == ["step"]
        asked.clear()
        trained.opt.step()
        assert asked == ["prepare", "prepare", "commit", "commit"]


def test_a_learning_rate_that_is_set_after_loading_a_state_counts() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=1.0)

    def stepped_by() -> float:
        before = layer.weight.item()
        optimizer.zero_grad()
        layer(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return before - layer.weight.item()

    optimizer.param_groups[0]["lr"] = 0.5
    assert stepped_by() == pytest.approx(0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    assert stepped_by() == pytest.approx(0.5)
    optimizer.param_groups[0]["lr"] = 0.25
    assert stepped_by() == pytest.approx(0.25)
