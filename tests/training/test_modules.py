"""Remote modules behave like modules: alone, and as parts of local ones."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest
import torch
from tests.training import models
from tests.training.conftest import Launch, Served, same
from torch import nn

import gradwire as gw
import gradwire_server as gws


def split(a: Served, b: Served) -> tuple[nn.Sequential, nn.Sequential]:
    """The same model over two workers and this process, and whole."""
    model = nn.Sequential(
        models.Layer(4, seed=1), a.handle.create("Layer", 4, seed=2), b.handle.create("Layer", 4, seed=3)
    )
    return model, nn.Sequential(*(models.Layer(4, seed=seed) for seed in (1, 2, 3)))


X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)


class TestCalling:
    def test_gives_what_the_module_gives_and_backpropagates(self, a: Served, b: Served) -> None:
        model, whole = split(a, b)
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        out, expected = model(x), whole(y)
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
        assert torch.equal(x.grad, y.grad)

    def test_takes_keyword_arguments(self, a: Served) -> None:
        layer = a.handle.create("Layer", width=4, seed=2)
        assert torch.equal(layer(X, scale=3.0), models.Layer(4, seed=2)(X, scale=3.0))

    def test_tuples_and_dicts_come_back_with_their_gradients(self, a: Served) -> None:
        remote = a.handle.create("Branching")
        whole = models.Branching()
        whole.load_state_dict(remote.state_dict())
        x, y = torch.ones(2, 3).double().requires_grad_(), torch.ones(2, 3).double().requires_grad_()
        mask = torch.tensor([[1.0, 0.0]]).double()
        for module, leaf in ((remote, x), (whole, y)):
            left, rest = module(leaf, mask=mask)
            assert rest["count"] == 2
            (left.sum() + 2 * rest["right"].sum()).backward()
        assert torch.equal(x.grad, y.grad)

    def test_other_methods_are_attributes_that_backpropagate(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.5)
        whole = models.Layer(4)
        for module in (layer, whole):
            module.penalty(power=2).backward()
        opt.step()
        torch.optim.SGD(whole.parameters(), lr=0.5).step()
        assert same(layer.state_dict(), whole.state_dict())
        assert "penalty" in dir(layer)
        with pytest.raises(AttributeError):
            _ = layer.no_such_method

    def test_static_and_class_methods_are_called_as_such(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        assert layer.plus_one(1) == 2
        assert layer.what() == "Layer"
        listed = {function.name: function for function in a.handle.functions()}["Layer"].methods
        assert list(listed["plus_one"].signature.parameters) == ["x"]
        assert not listed["what"].signature.parameters

    def test_methods_of_a_base_behind_torchs_are_there(self, a: Served) -> None:
        assert a.handle.create("Mixed", 2, 2).mixed_in() == "mixed in"

    def test_methods_of_a_base_that_is_not_exposed_are_not(self, a: Served) -> None:
        mixed = a.handle.create("Mixed", 2, 2)
        assert mixed.shown() == "hidden"  # what an exposed class does with them is its own affair
        assert mixed.wrapped() == "wrapped"
        with pytest.raises(gw.UnknownFunction, match="Hidden, which defines it, is not exposed"):
            mixed.ref.call("hidden")
        assert mixed.ref._message.methods == ["mixed_in", "shown", "wrapped"]
        listed = {function.name: function for function in a.handle.functions()}["Mixed"].methods
        assert list(listed) == ["mixed_in", "shown", "wrapped"]

    def test_torchs_own_methods_are_not_for_others_to_call(self, a: Served) -> None:
        """`to_empty` and then `state_dict` would bring memory that was another client's."""
        layer, mixed = a.handle.create("Layer", 4), a.handle.create("Mixed", 2, 2)
        for name in dir(nn.Module):
            for ref in (layer.ref, mixed.ref):
                # Layer has a forward of its own, and both can be called.
                if name != "__call__" and not (name == "forward" and ref is layer.ref):
                    with pytest.raises(gw.UnknownFunction):
                        ref.call(name, "cpu")
                    assert name not in ref._message.methods
        assert same(layer.state_dict(), models.Layer(4).state_dict())

    def test_nor_are_those_of_what_was_left_on_a_worker(self, a: Served, tmp_path: Path) -> None:
        tensor, array = a.handle.remote("square", torch.ones(4)), a.handle.remote("numbers", 4)
        for ref, method, args in (
            (tensor, "resize_", (100_000,)),
            (tensor, "new_empty", (100_000,)),
            (array, "tofile", (str(tmp_path / "file"),)),
            (a.handle.remote("echo", [1]), "append", (2,)),
        ):
            with pytest.raises(gw.UnknownFunction):
                ref.call(method, *args)
        assert list(tmp_path.iterdir()) == []

    def test_hooks_run_on_both_ends(self, a: Served) -> None:
        blocks = a.handle.create("Blocks")
        seen = []
        blocks.register_forward_hook(lambda module, args, out: seen.append(out.shape))
        blocks(torch.ones(3, 4))
        assert seen == [(3, 4)]
        assert blocks.hook_calls() == 1

    def test_private_names_and_attributes_cannot_be_called(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        for name in ("_apply", "__init__", "weight", "mro", "no_such"):
            with pytest.raises(gw.UnknownFunction):
                layer.ref.call(name)


class TestModes:
    def test_train_and_eval_of_the_whole_reach_it(self, a: Served) -> None:
        blocks = a.handle.create("Blocks")
        model = nn.Sequential(nn.Linear(4, 4), blocks)
        model.eval()
        assert not blocks.is_training()
        assert not blocks.training
        x = torch.ones(8, 4)
        assert torch.equal(model(x), model(x))  # no dropout
        model.train()
        assert blocks.is_training()
        assert not torch.equal(model(x), model(x))

    def test_running_statistics_live_there(self, a: Served) -> None:
        blocks, whole = a.handle.create("Blocks", dropout=0.0), models.Blocks(dropout=0.0)
        whole.load_state_dict(blocks.state_dict())
        for step in range(3):
            x = torch.randn(16, 4) + step
            assert torch.allclose(blocks(x), whole(x))
        state = blocks.state_dict()
        assert state["norm.num_batches_tracked"] == 3
        assert torch.allclose(state["norm.running_mean"], whole.norm.running_mean)

    def test_a_change_of_dtype_reaches_it_alone_and_in_a_whole(self, a: Served) -> None:
        blocks = a.handle.create("Blocks")

        def dtypes() -> set[torch.dtype]:
            return {value.dtype for value in blocks.state_dict().values()} - {torch.int64}

        assert blocks.double() is blocks
        assert dtypes() == {torch.float64}
        blocks.to(torch.float32)
        assert dtypes() == {torch.float32}
        whole = nn.Sequential(nn.Linear(4, 4), blocks)
        whole.half()
        assert dtypes() == {torch.float16}
        whole.to(torch.bfloat16)
        assert dtypes() == {torch.bfloat16}
        whole.float().cpu()
        assert dtypes() == {torch.float32}
        whole.to("cpu")
        assert dtypes() == {torch.float32}
        assert torch.is_tensor(whole(torch.ones(2, 4)))

    def test_zero_grad_forgets_gradients_there_alone_and_in_a_whole(self, a: Served, b: Served) -> None:
        for set_to_none in (True, False):
            model, _ = split(a, b)
            for reset in (model, model[1]):
                model(X).sum().backward()
                reset.zero_grad(set_to_none)
                kept = a.worker._peer.engine.container.contexts()
                assert not any(context.gradients() for context in kept)

    def test_frozen_parts_get_no_gradients_and_are_not_stepped(self, a: Served, b: Served) -> None:
        model, whole = split(a, b)
        for freeze in (model, whole):
            freeze[1].requires_grad_(False)
        opt = gw.optim.DistributedOptimizer(torch.optim.AdamW, [model], lr=0.1)
        plain = torch.optim.AdamW(whole.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            plain.zero_grad()
            model(X).sum().backward()
            whole(X).sum().backward()
            opt.step()
            plain.step()
        assert same(model.state_dict(), whole.state_dict())
        assert same(model[1].state_dict(), models.Layer(4, seed=2).state_dict())
        assert model[1].num_parameters() == 20
        assert model[1].num_parameters(trainable_only=True) == 0
        model.requires_grad_(False)
        assert model[2].num_parameters(trainable_only=True) == 0
        assert not model(X).requires_grad
        for parameter in model.parameters():
            parameter.requires_grad = True
        assert model[1].num_parameters(trainable_only=True) == 20

    def test_parameters_have_a_stand_in_that_torchs_optimizers_refuse(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        (stand_in,) = layer.parameters()
        assert stand_in.numel() == 0
        assert "Layer" in repr(stand_in)
        with pytest.raises(TypeError, match="DistributedOptimizer"):
            torch.optim.SGD(nn.Sequential(nn.Linear(2, 2), layer).parameters(), lr=0.1)
        with pytest.raises(TypeError, match="on 127"):
            stand_in.grad = torch.zeros(0)


class TestState:
    def test_goes_there_and_back(self, a: Served, b: Served) -> None:
        model, whole = split(a, b)
        assert same(model.state_dict(), whole.state_dict())
        other = nn.Sequential(*(models.Layer(4, seed=seed) for seed in (4, 5, 6)))
        assert str(model.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
        assert same(model.state_dict(), other.state_dict())
        assert torch.equal(model(X), other(X))

    def test_is_of_torchs_type_with_the_versions_of_its_modules(self, a: Served) -> None:
        state = a.handle.create("Blocks").state_dict()
        expected = models.Blocks().state_dict()
        assert state._metadata == expected._metadata
        wrapped = nn.Sequential(a.handle.create("Blocks")).state_dict()
        assert wrapped._metadata == nn.Sequential(models.Blocks()).state_dict()._metadata

    @pytest.mark.parametrize("nested", [False, True])
    def test_what_does_not_fit_raises_as_torch_does(self, a: Served, nested: bool) -> None:
        remote: nn.Module = a.handle.create("Layer", 4)
        whole: nn.Module = models.Layer(4)
        prefix = ""
        if nested:
            remote, whole, prefix = nn.Sequential(nn.ReLU(), remote), nn.Sequential(nn.ReLU(), whole), "1."
        state = whole.state_dict()
        lacking = {key: value for key, value in state.items() if "bias" not in key}
        excessive = {**state, f"{prefix}more": torch.zeros(1)}
        misshapen = {**state, f"{prefix}bias": torch.zeros(9)}
        for wrong in (lacking, excessive, misshapen):
            messages = []
            for module in (remote, whole):
                with pytest.raises(RuntimeError) as caught:
                    module.load_state_dict(wrong)
                messages.append(str(caught.value))
            assert messages[0] == messages[1]
        for wrong in (lacking, excessive):
            assert remote.load_state_dict(wrong, strict=False) == whole.load_state_dict(wrong, strict=False)

    def test_buffers_and_tied_parameters_are_in_it(self, a: Served) -> None:
        blocks = a.handle.create("Blocks")
        assert list(blocks.state_dict()) == list(models.Blocks().state_dict())
        # The tied weight counts once.
        assert blocks.num_parameters() == sum(p.numel() for p in models.Blocks().parameters())


class TestTiedParameters:
    def test_are_trained_as_one(self, a: Served) -> None:
        blocks, whole = a.handle.create("Blocks", dropout=0.0), models.Blocks(dropout=0.0)
        whole.load_state_dict(blocks.state_dict())
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [blocks], lr=0.1, momentum=0.9)
        plain = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(8, 4)
        for _ in range(3):
            opt.zero_grad()
            plain.zero_grad()
            blocks(x).pow(2).sum().backward()
            whole(x).pow(2).sum().backward()
            opt.step()
            plain.step()
        state = blocks.state_dict()
        assert torch.equal(state["tied.weight"], state["stack.0.weight"])
        assert same(state, whole.state_dict())


class TestBeingAModule:
    def test_says_what_it_is(self, a: Served) -> None:
        assert repr(a.handle.create("Layer", 4)) == f"RemoteModule(Layer on {a.worker.address})"
        assert "name='shared'" in repr(nn.Sequential(a.handle.get("shared")))

    def test_cannot_be_copied_or_pickled(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict"):
                attempt(layer)

    def test_wrong_arguments_name_the_signature(self, a: Served) -> None:
        with pytest.raises(gw.WrongArguments, match="width"):
            a.handle.create("Layer", depth=3)
        layer = a.handle.create("Layer", 4)
        with pytest.raises(gw.WrongArguments, match="scale"):
            layer(X, 3.0)
        with pytest.raises(ValueError, match="stale"):
            a.handle.create("Layer", 4, stale="maybe")


class TestAmongLocalModules:
    @pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
    @pytest.mark.parametrize("foreach", [None, False])
    def test_torchs_clipping_refuses_rather_than_leave_it_out(
        self, a: Served, is_first: bool, foreach: bool | None
    ) -> None:
        parts = [models.Layer(4), a.handle.create("Layer", 4)]
        model = nn.Sequential(*(reversed(parts) if is_first else parts))
        model(X).sum().backward()
        utils = torch.nn.utils
        with pytest.raises(TypeError, match="optimizer.clip_grad_norm_"):
            utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        with pytest.raises(TypeError, match="optimizer.clip_grad_norm_"):
            utils.clip_grad_value_(model.parameters(), 1.0, foreach=foreach)
        with pytest.raises(TypeError, match="optimizer.clip_grad_norm_"):
            utils.get_total_norm([p.grad for p in model.parameters()], foreach=foreach)
        # What torch itself does with gradients goes on working.
        for set_to_none in (True, False):
            model.zero_grad(set_to_none)
        model.requires_grad_(False)
        assert a.handle.create("Layer", 4).num_parameters(trainable_only=True) == 20
        assert parts[1].num_parameters(trainable_only=True) == 0

    def test_distributed_data_parallel_goes_around_it(self, a: Served, tmp_path: Path) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
        )
        try:
            remote = a.handle.create("Layer", 4, seed=2)
            parallel = nn.parallel.DistributedDataParallel(nn.Sequential(models.Layer(4), remote))
            whole = nn.Sequential(models.Layer(4), models.Layer(4, seed=2))
            opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [parallel.module], lr=0.1)
            plain = torch.optim.SGD(whole.parameters(), lr=0.1)
            for _ in range(3):
                for model, optimizer in ((parallel, opt), (whole, plain)):
                    optimizer.zero_grad()
                    model(X).pow(2).sum().backward()
                    optimizer.step()
            assert same(parallel.module.state_dict(), whole.state_dict())
        finally:
            torch.distributed.destroy_process_group()


class TestSharing:
    def test_a_name_is_for_everybody_and_taken_once(self, a: Served) -> None:
        made = a.handle.create("Layer", 4, name="mine")
        with pytest.raises(gw.AlreadyExists, match="mine"):
            a.handle.create("Layer", 4, name="mine")
        again = a.handle.get("mine")
        made.zero_grad()
        assert same(made.state_dict(), again.state_dict())
        again.delete()
        with pytest.raises(gw.NotFound, match="mine"):
            a.handle.get("mine")
        with pytest.raises(gw.NotFound):
            made(X)
        a.handle.create("Layer", 4, name="mine")

    def test_what_the_worker_exposes_is_there_and_cannot_be_deleted(self, a: Served) -> None:
        shared = a.handle.get("shared")
        assert torch.equal(shared(X), models.shared(X))
        assert torch.equal(a.handle.shared(X), models.shared(X))
        with pytest.raises(gw.PermissionDenied, match="shared"):
            shared.delete()
        assert torch.equal(shared(X), models.shared(X))
        assert "shared" in [f.name for f in a.handle.functions() if f.kind == "instance"]

    def test_nothing_of_that_name(self, a: Served) -> None:
        with pytest.raises(gw.NotFound, match="no_such"):
            a.handle.get("no_such")

    def test_workers_with_the_same_name_are_not_confused(self, a: Served, b: Served) -> None:
        a.handle.create("Layer", 4, seed=1, name="same")
        b.handle.create("Layer", 4, seed=2, name="same")
        expected = models.Layer(4, seed=1)(X) * 3
        assert torch.equal(b.handle.call_it(a.handle.get("same"), X), expected)

    def test_instances_are_exposed_on_the_command_line(self, daemon: Launch) -> None:
        served = daemon(
            "--expose-instance", "models:plain=settings", "--expose-instance", "models:shared=enc"
        )
        with gw.connect(served.address) as worker:
            assert worker.get("settings").fetch() == {"a": 1}
            assert torch.equal(worker.get("enc")(X), models.Layer(4, seed=7)(X))
            with pytest.raises(gw.PermissionDenied):
                worker.get("settings").delete()

    def test_an_exposed_instance_needs_a_name(self) -> None:
        with pytest.raises(TypeError, match="name="):
            gws.expose(models.Notebook())

    def test_signatures_of_created_classes_are_told(self, a: Served) -> None:
        listed = {function.name: function for function in a.handle.functions()}["Layer"]
        assert listed.kind == "class"
        assert isinstance(listed.signature, inspect.Signature)
        assert "penalty" in listed.methods
