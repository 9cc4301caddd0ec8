"""Torch's own tools for training, over parameters here and on workers: right or refused, never wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import models
from tests.training.conftest import Served, same
from tests.training.test_optimizers import Trained, X
from torch import nn
from torch.amp import GradScaler
from torch.nn import utils

import gradwire as gw
import gradwire_server as gws
from gradwire.training.optimizers import DistributedOptimizer
from gradwire_server.objects import internal_functions


class Scaled(Trained):
    """Trained with a scaler each."""

    def __init__(self, a: Served, b: Served, *args: Any, **options: Any) -> None:
        super().__init__(a, b, *args, **options)
        settings: Any = {"init_scale": 1024.0, "growth_interval": 2}
        self.scaler, self.plain_scaler = GradScaler("cpu", **settings), GradScaler("cpu", **settings)

    def train(self, spoil: int | None = None, clip: float | None = None) -> None:
        """One step. `spoil` names the layer whose gradients are not finite."""
        for model, optimizer, scaler in (
            (self.split, self.opt, self.scaler),
            (self.whole, self.plain, self.plain_scaler),
        ):
            optimizer.zero_grad()
            loss = model(X).pow(2).sum()
            if spoil is not None:
                # The gradient of what a layer gives is infinite, and that of no other layer.
                loss = loss + (model[spoil](model[0](X).detach()) * math.inf).sum() if spoil else loss
                loss = loss + (model[0](X) * math.inf).sum() if spoil == 0 else loss
            scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                if optimizer is self.opt:
                    self.opt.clip_grad_norm_(clip)
                else:
                    utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()


def test_unscaling_that_failed_on_one_worker_and_is_tried_again_skips_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was unscaled before must not be unscaled twice."""
    unscale, calls = internal_functions.unscale, []

    def fails_the_second_time(*args: Any) -> bool:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no memory for this")
        return unscale(*args)

    monkeypatch.setattr(internal_functions, "unscale", fails_the_second_time)
    with gws.Worker(models.Layer) as one, gws.Worker(models.Layer) as two:
        with gw.connect(one.address) as first, gw.connect(two.address) as second:
            model = nn.Sequential(models.Layer(4), first.create("Layer", 4), second.create("Layer", 4))
            optimizer = DistributedOptimizer(torch.optim.SGD, [model], lr=0.1)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            scaler = GradScaler("cpu", init_scale=1024.0)
            scaler.scale(model(X).sum()).backward()
            with pytest.raises(OSError, match="no memory"):
                scaler.unscale_(optimizer)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 512.0
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            optimizer.zero_grad()
            scaler.scale(model(X).sum()).backward()
            scaler.step(optimizer)
            assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class TestGradScaler:
    @pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
    def test_steps_as_in_one_process_bit_for_bit(
        self, a: Served, b: Served, optimizer_class: type[torch.optim.Optimizer]
    ) -> None:
        trained = Scaled(a, b, optimizer_class, lr=0.1)
        for _ in range(5):
            trained.train()
            assert trained.scaler.get_scale() == trained.plain_scaler.get_scale()
        assert trained.agrees
        assert trained.scaler.get_scale() == 4096.0

    @pytest.mark.parametrize("spoiled", [0, 1, 2], ids=["here", "on one worker", "on the other"])
    def test_gradients_that_are_not_finite_anywhere_skip_the_step_everywhere(
        self, a: Served, b: Served, spoiled: int
    ) -> None:
        trained = Scaled(a, b, torch.optim.Adam, lr=0.1)
        trained.train()
        before = copy.deepcopy(trained.split.state_dict())
        trained.train(spoil=spoiled)
        assert same(trained.split.state_dict(), before)
        assert trained.scaler.get_scale() == 512.0
        for _ in range(3):
            trained.train()
        assert trained.agrees
        assert trained.scaler.state_dict() == trained.plain_scaler.state_dict()

    @pytest.mark.parametrize("clip", [0.01, 1e6])
    def test_gradients_are_unscaled_before_they_are_clipped(self, a: Served, b: Served, clip: float) -> None:
        trained = Scaled(a, b, lr=0.1)
        for _ in range(3):
            trained.train(clip=clip)
        for one, other in zip(
            trained.split.state_dict().values(), trained.whole.state_dict().values(), strict=True
        ):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("spoiled", [0, 1])
    def test_what_was_unscaled_before_is_skipped_as_well(self, a: Served, b: Served, spoiled: int) -> None:
        trained = Scaled(a, b, lr=0.1)
        trained.train(spoil=spoiled, clip=1.0)
        assert trained.agrees
        assert trained.scaler.get_scale() == trained.plain_scaler.get_scale() == 512.0

    def test_over_several_steps_of_accumulation(self, a: Served, b: Served) -> None:
        trained = Scaled(a, b, lr=0.1)
        for model, optimizer, scaler in (
            (trained.split, trained.opt, trained.scaler),
            (trained.whole, trained.plain, trained.plain_scaler),
        ):
            for part in range(3):
                scaler.scale(model(X + part).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert trained.agrees

    def test_remote_parameters_alone(self, a: Served) -> None:
        layer, whole = a.handle.create("Layer", 4), models.Layer(4)
        for module, opt in (
            (layer, DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)),
            (whole, torch.optim.SGD(whole.parameters(), lr=0.1)),
        ):
            scaler = GradScaler("cpu")
            scaler.scale(module(X).sum()).backward()
            scaler.step(opt)
            scaler.update()
        assert same(layer.state_dict(), whole.state_dict())

    def test_sparse_gradients(self, a: Served) -> None:
        remote, whole = a.handle.create("Table"), models.Table()
        for module, opt in (
            (remote, DistributedOptimizer(torch.optim.SparseAdam, [remote], lr=0.1)),
            (whole, torch.optim.SparseAdam(list(whole.parameters()), lr=0.1)),
        ):
            scaler = GradScaler("cpu", init_scale=3.0)
            for unscale in (False, True):
                opt.zero_grad()
                scaler.scale(module(torch.tensor([1, 1, 3])).pow(2).sum()).backward()
                if unscale:
                    scaler.unscale_(opt)
                scaler.step(opt)
                scaler.update()
        assert same(remote.state_dict(), whole.state_dict())

    def test_modules_that_share_parameters_are_unscaled_once(self, a: Served) -> None:
        a.handle.create("Layer", 4, name="twice")
        one, two = a.handle.get("twice"), a.handle.get("twice")
        whole = models.Layer(4)
        opt = DistributedOptimizer(torch.optim.SGD, [{"params": [one, two]}], lr=0.1)
        plain = torch.optim.SGD(whole.parameters(), lr=0.1)
        for module, optimizer in ((one, opt), (whole, plain)):
            scaler = GradScaler("cpu")
            scaler.scale(module(X).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        assert same(one.state_dict(), whole.state_dict())

    def test_a_step_that_was_refused_can_be_tried_again(self, a: Served, b: Served) -> None:
        trained = Scaled(a, b, lr=0.1)
        trained.backward()
        trained.opt.zero_grad()
        for model, scaler in ((trained.split, trained.scaler), (trained.whole, trained.plain_scaler)):
            model.zero_grad()
            scaler.scale(model(X).pow(2).sum()).backward()
        nothing = a.handle.create("Layer", 4, seed=9)
        alone = DistributedOptimizer(torch.optim.SGD, [nothing], lr=0.1)
        for _ in range(2):
            with pytest.raises(gw.StepRefused, match="no gradients"):
                trained.scaler.step(alone)
        trained.scaler.scale(nothing(X).sum()).backward()
        trained.scaler.step(alone)
        whole = models.Layer(4, seed=9)
        whole(X).sum().backward()
        torch.optim.SGD(whole.parameters(), lr=0.1).step()
        assert same(nothing.state_dict(), whole.state_dict())
        trained.scaler.step(trained.opt)
        trained.plain_scaler.step(trained.plain)
        assert trained.agrees

    def test_contexts_are_refused(self, a: Served, b: Served) -> None:
        trained = Scaled(a, b, lr=0.1)
        local = models.Layer(4)
        here = DistributedOptimizer(torch.optim.SGD, [local], lr=0.1)
        before = copy.deepcopy(trained.split.state_dict())
        with gw.context() as context:
            context.backward(trained.scaler.scale(trained.split(X).sum()))
            with pytest.raises(TypeError, match="plain backward"):
                trained.scaler.unscale_(trained.opt)
            with pytest.raises(TypeError, match="plain backward"):
                trained.scaler.step(trained.opt, context)
            context.backward(trained.scaler.scale(local(X).sum()))
            local.weight.grad = torch.ones_like(local.weight)  # of another backward
            with pytest.raises(TypeError, match="plain backward"):
                trained.scaler.step(here, context)
        with gw.context() as context:
            context.backward(trained.split(X).sum())
        with pytest.raises(TypeError, match="plain backward"):
            trained.scaler.step(trained.opt, context)
        assert same(trained.split.state_dict(), before)
        assert same(local.state_dict(), models.Layer(4).state_dict())

    def test_one_that_is_not_enabled_does_nothing(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, lr=0.1)
        scaler = GradScaler("cpu", enabled=False)
        trained.backward()
        scaler.step(trained.opt)
        scaler.update()
        trained.plain.step()
        assert trained.agrees


class TestContexts:
    def test_gradients_of_a_context_that_was_not_passed_are_not_left_out(self, a: Served, b: Served) -> None:
        """The workers would step with those of the context, and the parameters here not at all."""
        trained = Trained(a, b, lr=0.1)
        with gw.context() as context:
            context.backward(trained.split(X).pow(2).sum())
            for wrong in (trained.opt.step, lambda: trained.opt.clip_grad_norm_(1.0)):
                with pytest.raises(TypeError, match="pass it"):
                    wrong()
            trained.opt.step(context)
        trained.whole(X).pow(2).sum().backward()
        trained.plain.step()
        assert trained.agrees

    def test_gradients_of_a_context_are_zeroed_here_and_there(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, lr=0.1)
        with gw.context() as context:
            for _ in range(3):
                trained.opt.zero_grad()
                trained.plain.zero_grad()
                context.backward(trained.split(X).pow(2).sum())
                trained.whole(X).pow(2).sum().backward()
                trained.opt.step(context)
                trained.plain.step()
        assert trained.agrees


class TestAddingGroups:
    @pytest.mark.parametrize("given", ["module", "parameters"])
    def test_of_everything_goes_on_as_in_one_process(self, a: Served, b: Served, given: str) -> None:
        trained = Trained(a, b, torch.optim.Adam, lr=0.1)
        for _ in range(3):
            trained.step()
        # On a worker that has a part, and local.
        split = nn.Sequential(models.Layer(4, seed=5), a.handle.create("Layer", 4, seed=6))
        whole = nn.Sequential(*(models.Layer(4, seed=seed) for seed in (5, 6)))
        trained.opt.add_param_group(
            {"params": split if given == "module" else list(split.parameters()), "lr": 0.01}
        )
        trained.plain.add_param_group({"params": whole.parameters(), "lr": 0.01})
        trained.split.extend(split)
        trained.whole.extend(whole)
        schedules = [torch.optim.lr_scheduler.StepLR(opt, 1) for opt in (trained.opt, trained.plain)]
        for _ in range(3):
            trained.step()
            for schedule in schedules:
                schedule.step()
        assert trained.agrees
        assert [group["lr"] for group in trained.opt.param_groups] == [
            group["lr"] for group in trained.plain.param_groups
        ]

    def test_on_a_worker_that_has_had_no_part(self, a: Served, b: Served) -> None:
        first, second = a.handle.create("Layer", 4, seed=1), b.handle.create("Layer", 4, seed=2)
        whole = [models.Layer(4, seed=1), models.Layer(4, seed=2)]
        opt = DistributedOptimizer(torch.optim.Adam, [first], lr=0.1)
        plain = torch.optim.Adam(whole[0].parameters(), lr=0.1)

        def train(layers: list[Any], optimizer: Any) -> None:
            optimizer.zero_grad()
            layers[1](layers[0](X)).sum().backward()
            optimizer.step()

        train([first, second], opt)
        train(whole, plain)
        opt.add_param_group({"params": [second]})
        plain.add_param_group({"params": list(whole[1].parameters())})
        for _ in range(2):
            train([first, second], opt)
            train(whole, plain)
        assert same(first.state_dict(), whole[0].state_dict())
        assert same(second.state_dict(), whole[1].state_dict())
        assert len(opt.state_dict()["remote"]) == 2

    def test_a_state_that_was_saved_after_it_fits_one_that_was_made_so(
        self, a: Served, b: Served, tmp_path: Any
    ) -> None:
        trained = Trained(a, b, torch.optim.Adam, lr=0.1)
        more, whole = b.handle.create("Layer", 4, seed=5), models.Layer(4, seed=5)
        trained.opt.add_param_group({"params": [more], "lr": 0.02})
        trained.plain.add_param_group({"params": list(whole.parameters()), "lr": 0.02})
        trained.split.append(more)
        trained.whole.append(whole)
        trained.step()
        gw.save(tmp_path / "checkpoint", trained.split, trained.opt)
        again = DistributedOptimizer(
            torch.optim.Adam, [{"params": trained.split[:3]}, {"params": [more], "lr": 0.5}], lr=0.1
        )
        gw.load(tmp_path / "checkpoint", trained.split, again)
        assert again.param_groups[1]["lr"] == 0.02
        trained.opt = again
        trained.step()
        assert trained.agrees
        with pytest.raises(gw.CheckpointError, match="groups"):
            gw.load(
                tmp_path / "checkpoint",
                trained.split,
                DistributedOptimizer(torch.optim.Adam, trained.split, lr=0.1),
            )

    def test_what_does_not_fit_changes_nothing(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, torch.optim.Adam, lr=0.1)
        trained.step()
        other = a.handle.create("Layer", 4)
        weight = torch.ones(2, requires_grad=True)
        for group, error in (
            ({"params": trained.split[1]}, "more than one parameter group"),
            ({"params": list(trained.split[0].parameters())}, "more than one parameter group"),
            ({"params": [other, weight * 2]}, "leaf"),
            ({"params": []}, "no parameters"),
            ({"params": ["other"]}, "neither"),
        ):
            with pytest.raises((ValueError, TypeError), match=error):
                trained.opt.add_param_group(group)
        assert len(trained.opt.param_groups) == 1
        trained.step()
        assert trained.agrees

    def test_a_worker_that_cannot_leaves_all_as_it_was(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, torch.optim.Adam, lr=0.1)
        trained.step()
        kept, gone = a.handle.create("Layer", 4, seed=7), b.handle.create("Layer", 4, name="gone")
        b.handle.get("gone").delete()
        with pytest.raises(gw.NotFound):
            trained.opt.add_param_group({"params": [kept, gone]})
        assert len(trained.opt.param_groups) == 1
        trained.step()
        assert trained.agrees
        trained.opt.add_param_group({"params": [kept]})
        assert trained.opt.group_sizes()[1][0][1] == [2, 2]

    def test_a_worker_that_has_lost_the_link_makes_it_with_the_new_group(self, a: Served, b: Served) -> None:
        trained = Trained(a, b, torch.optim.Adam, lr=0.1)
        trained.step()
        more, whole = a.handle.create("Layer", 4, seed=5), models.Layer(4, seed=5)
        trained.opt.add_param_group({"params": [more]})
        trained.plain.add_param_group({"params": list(whole.parameters())})
        trained.split.append(more)
        trained.whole.append(whole)
        trained.step()
        # As if the worker had let go of the optimizer, which it still has when it is made anew.
        part = next(part for part in trained.opt._remote if part.worker is a.handle)
        part.start_creating(resume=True)()
        trained.step()
        assert trained.agrees


class TestToolsThatGoThroughParameters:
    """Each is right, or says that the parameters are on a worker."""

    @pytest.mark.parametrize(
        "use",
        [
            lambda model: torch.optim.swa_utils.AveragedModel(model),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model: utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda model: utils.clip_grad_value_(model.parameters(), 1.0),
            lambda model: utils.get_total_norm([p.grad for p in model.parameters()]),
            lambda model: utils.parameters_to_vector(model.parameters()),
            lambda model: utils.vector_to_parameters(torch.zeros(20), list(model[1].parameters())),
            lambda model: sum(p.pow(2).sum() for p in model.parameters()),
            lambda model: [p.detach().clone() for p in model.parameters()],
            lambda model: [p.data for p in model.parameters()],
            lambda model: [nn.init.zeros_(p) for p in model.parameters()],
            lambda model: [p.register_hook(print) for p in model.parameters()],
            lambda model: [p.register_post_accumulate_grad_hook(print) for p in model.parameters()],
            lambda model: [p.grad.norm() for p in model.parameters()],
            lambda model: [p.grad.mul_(0.5) for p in model.parameters()],
            lambda model: torch._foreach_add_(list(model.parameters()), 1.0),
            lambda model: utils.parametrizations.weight_norm(model[1], "<remote>"),
            lambda model: copy.deepcopy(model),
        ],
        ids=[
            "AveragedModel",
            "an optimizer of torch",
            "clip_grad_norm_",
            "clip_grad_value_",
            "get_total_norm",
            "parameters_to_vector",
            "vector_to_parameters",
            "a penalty",
            "copies",
            "data",
            "init",
            "a hook",
            "a post-accumulate hook",
            "a norm of gradients",
            "scaling gradients",
            "foreach",
            "weight_norm",
            "deepcopy",
        ],
    )
    def test_is_refused(self, a: Served, use: Callable[[nn.Module], object]) -> None:
        model = nn.Sequential(models.Layer(4), a.handle.create("Layer", 4))
        model(X).sum().backward()
        with pytest.raises(TypeError, match="worker|remote|DistributedOptimizer"):
            use(model)

    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own package
    def test_an_optimizer_that_shares_out_its_state_refuses_them(self, a: Served, tmp_path: Path) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
        )
        try:
            model = nn.Sequential(models.Layer(4), a.handle.create("Layer", 4))
            with pytest.raises(TypeError, match="on a worker"):
                ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        finally:
            torch.distributed.destroy_process_group()

    def test_the_parameters_of_an_optimizer_are_not_without_those_on_workers(
        self, a: Served, b: Served
    ) -> None:
        trained = Trained(a, b, lr=0.1)
        trained.backward()
        shown = [p for group in trained.opt.param_groups for p in group["params"]]
        assert len(shown) == 2 + 1 + 1
        with pytest.raises(TypeError, match="on a worker"):
            utils.clip_grad_norm_(shown, 1.0)
        assert next(iter(trained.split[1].parameters())).device == torch.device("cpu")

    def test_a_schedule_for_averaging_weights_is_kept_to(self, a: Served) -> None:
        layer, whole = a.handle.create("Layer", 4), models.Layer(4)
        for module, optimizer in (
            (layer, DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)),
            (whole, torch.optim.SGD(whole.parameters(), lr=0.1)),
        ):
            schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
            for _ in range(3):
                optimizer.zero_grad()
                module(X).sum().backward()
                optimizer.step()
                schedule.step()
        assert same(layer.state_dict(), whole.state_dict())
