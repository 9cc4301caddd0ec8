"""Every private name of torch that gradwire uses, with what gradwire relies on.

torch may rename or change any of them in its next release. So no other module of gradwire uses a private
name of torch. When this module is imported, it looks for every such name and tries out the essential ones. A
torch that lacks a name, or in which it behaves differently, is refused with an ImportError instead of giving
wrong gradients.

Most are plain aliases or C functions made by `operator`, since they are used in every call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = [
    "NEWEST_TORCH",
    "OLDEST_TORCH",
    "OVERRIDDEN",
    "IncompatibleKeys",
    "apply_function",
    "check_engine",
    "coo_indices",
    "coo_values",
    "current_graph_task_id",
    "engine_run_backward",
    "forward_traceback",
    "graph_task_keeps_graph",
    "input_metadata",
    "is_any_autocast_enabled",
    "is_functorch_wrapped",
    "is_stashed",
    "is_zerotensor",
    "load_symbolic_shapes",
    "make_per_channel_quantized",
    "make_per_tensor_quantized",
    "make_subclass",
    "make_unchecked_compressed",
    "make_unchecked_coo",
    "parse_to",
    "post_accumulate_grad_hooks",
    "preserving_versions",
    "put_parameter",
    "queue_callback",
    "sequence_number",
    "set_grad_enabled",
    "set_sequence_number",
    "set_state_metadata",
    "stash",
    "stashed",
    "state_metadata",
    "storage_id",
    "tree_map_only",
    "unscale_and_check",
    "unstash",
    "validate_compressed",
    "validate_coo",
    "version_of",
    "will_engine_execute_node",
]

OLDEST_TORCH = "2.13"
NEWEST_TORCH = "2.13"
"""The range of torch that the tests have been run on; pyproject.toml claims the same."""


def _unsupported(what: str) -> ImportError:
    return ImportError(
        f"this version of gradwire needs torch >= {OLDEST_TORCH} (tested up to {NEWEST_TORCH}); "
        f"torch {torch.__version__} {what}"
    )


def _find(path: str) -> Any:
    """What a dotted name of torch stands for, such as "torch._C._stash_obj_in_tls"."""
    found: Any = torch
    for name in path.split(".")[1:]:
        try:
            found = getattr(found, name)
        except (AttributeError, RuntimeError) as error:  # RuntimeError: of torch.ops, for a missing overload
            raise _unsupported(f"lacks {path}") from error
    return found


def _attribute(path: str) -> Callable[[Any], Any]:
    """A getter, as fast as the attribute itself, for an attribute that instances of a class of torch have."""
    _find(path)
    return attrgetter(path.rpartition(".")[2])


def _method(path: str) -> Callable[[Any], Any]:
    """A caller for a method without arguments that instances of a class of torch have."""
    _find(path)
    return methodcaller(path.rpartition(".")[2])


# -- the engine, from within a backward

current_graph_task_id: Callable[[], int] = _find("torch._C._current_graph_task_id")
"""A number for the graph task that runs on this thread; no other graph task of the process has it."""

graph_task_keeps_graph: Callable[[], bool] = _find("torch._C._autograd._get_current_graph_task_keep_graph")
"""The `retain_graph` that the running graph task was started with."""

will_engine_execute_node: Callable[[Node], bool] = _find("torch._C._will_engine_execute_node")
"""Whether a node is executed in the running graph task. For the node of a leaf that is reached: True in a
plain backward(), False in torch.autograd.grad and backward(inputs=...) for other inputs."""

queue_callback: Callable[[Callable[[], None]], None] = _find(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
"""Has the engine call a function after the last node of the running graph task and before backward
returns. What it raises, backward raises."""

engine_run_backward: Callable[..., tuple[torch.Tensor | None, ...]] = _find(
    "torch.autograd.graph._engine_run_backward"
)
"""What torch.autograd.grad and backward come down to for gradients that are known to fit."""


# -- objects that torch hands on to the threads of its engine

stash: Callable[[str, object], None] = _find("torch._C._stash_obj_in_tls")
"""Keeps an object under a key in the thread-local state that torch hands on to whichever thread runs a
node."""

stashed: Callable[[str], Any] = _find("torch._C._get_obj_in_tls")
"""The object under a key that is stashed."""

is_stashed: Callable[[str], bool] = _find("torch._C._is_key_in_tls")
"""Whether there is an object under a key."""

unstash: Callable[[str], None] = _find("torch._C._remove_obj_from_tls")
"""Takes away key and object. None in the object's place would not do: torch lets go of what is there when
the thread ends, which is too late for Python if the process ends, too."""


# -- nodes

_find("torch._C._FunctionBase.apply")


def apply_function(function: type[torch.autograd.Function], *args: object) -> Any:
    """What `function.apply` comes down to for tensors that torch.func has not wrapped."""
    apply: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply(*args)


sequence_number: Callable[[Node], int] = _method("torch.autograd.function.BackwardCFunction._sequence_nr")
"""The priority of a node. Of the nodes that can run, the engine runs the one with the highest number
first. A thread numbers the nodes that it makes from 0 on."""

_find("torch.autograd.function.BackwardCFunction._set_sequence_nr")


def set_sequence_number(node: Node, number: int) -> None:
    """Gives a node another priority."""
    node._set_sequence_nr(number)  # type: ignore[attr-defined]


input_metadata: Callable[[Node], Sequence[Any]] = _attribute(
    "torch.autograd.function.BackwardCFunction._input_metadata"
)
"""What a node knows of each gradient that it takes, with the `device`, on whose thread the engine runs the
node."""


def forward_traceback(node: Node) -> Sequence[str] | None:
    """Lines that say where the forward made a node; None unless that was with anomaly detection."""
    metadata: Any = node.metadata  # torch declares a method; it is a dict
    lines: Sequence[str] | None = metadata.get("traceback_")
    return lines


post_accumulate_grad_hooks: Callable[[torch.Tensor], Mapping[int, Callable[[torch.Tensor], None]] | None] = (
    _attribute("torch.Tensor._post_accumulate_grad_hooks")
)
"""The hooks of register_post_accumulate_grad_hook, in the order of their registration."""


# -- modes

set_grad_enabled: Callable[[bool], None] = _find("torch._C._set_grad_enabled")
"""Sets the grad mode of this thread, without the context manager around it."""

is_any_autocast_enabled: Callable[[], bool] = _find("torch._C._is_any_autocast_enabled")
"""Whether autocast is on for any type of device."""

is_functorch_wrapped: Callable[[torch.Tensor], bool] = _find(
    "torch._C._functorch.is_functorch_wrapped_tensor"
)
"""Whether a tensor is one of torch.func (vmap, grad, ...), without memory of its own."""


# -- tensors

version_of: Callable[[torch.Tensor], int] = _attribute("torch.Tensor._version")
"""Grows with every write in place to the tensor or to a view of it. Raises RuntimeError for a tensor of
inference mode."""

_find("torch.UntypedStorage._cdata")


def storage_id(tensor: torch.Tensor) -> int:
    """The same for tensors over the same storage, another for any other storage that is alive."""
    address: int = tensor.untyped_storage()._cdata
    return address


preserving_versions: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] = _find(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter"
)
"""Runs a block after which tensors that are not empty have the versions from before, whatever was written."""

make_subclass: Callable[..., Any] = _find("torch.Tensor._make_subclass")
"""A tensor of a subclass over the memory of another: class, data, and whether it requires grad."""

is_zerotensor: Callable[[torch.Tensor], bool] = _find("torch.Tensor._is_zerotensor")
"""Whether a tensor stands for zeros without holding any."""

coo_indices: Callable[[torch.Tensor], torch.Tensor] = _find("torch.Tensor._indices")
"""The indices of a sparse COO tensor, coalesced or not."""

coo_values: Callable[[torch.Tensor], torch.Tensor] = _find("torch.Tensor._values")
"""The values of a sparse COO tensor, coalesced or not. Not a copy."""

validate_coo: Callable[..., None] = _find("torch._validate_sparse_coo_tensor_args")
"""Raises RuntimeError for indices and values that make no valid COO tensor, without a setting of the
process."""

validate_compressed: Callable[..., None] = _find("torch._validate_sparse_compressed_tensor_args")
"""The same for compressed sparse layouts."""

make_unchecked_coo: Callable[..., torch.Tensor] = _find("torch.ops.aten._sparse_coo_tensor_unsafe.default")
"""A COO tensor of indices and values that were validated; they are not copied."""

make_unchecked_compressed: Callable[..., torch.Tensor] = _find(
    "torch.ops.aten._sparse_compressed_tensor_unsafe.default"
)
"""The same for compressed sparse layouts."""

make_per_tensor_quantized: Callable[..., torch.Tensor] = _find("torch._make_per_tensor_quantized_tensor")
"""A quantized tensor of integers, a scale and a zero point."""

make_per_channel_quantized: Callable[..., torch.Tensor] = _find("torch._make_per_channel_quantized_tensor")
"""A quantized tensor of integers, scales, zero points and an axis."""

tree_map_only: Callable[[type[Any], Callable[[Any], Any], Any], Any] = _find(
    "torch.utils._pytree.tree_map_only"
)
"""Replaces the objects of one type within containers; what is of another type is left as it is."""


# -- modules, optimizers and gradient scalers

IncompatibleKeys: Callable[[list[str], list[str]], Any] = _find("torch.nn.modules.module._IncompatibleKeys")
"""What `load_state_dict` of a module returns: missing and unexpected keys."""

parse_to: Callable[..., tuple[torch.device | None, torch.dtype | None, bool, Any]] = _find(
    "torch._C._nn._parse_to"
)
"""Understands the arguments of `module.to`: device and dtype come first in what it returns."""

unscale_and_check: Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None] = _find(
    "torch._amp_foreach_non_finite_check_and_unscale_"
)
"""What a GradScaler calls with gradients, `found_inf` and the inverse scale: multiplies in place, and sets
found_inf to 1 where a gradient is not finite. A GradScaler calls this very function, so
`__torch_function__` sees it."""

OVERRIDDEN = ("_apply", "_load_from_state_dict", "_step_supports_amp_scaling")
"""Names that gradwire's own subclasses define, because torch looks for them there. `_apply` of a module
changes the dtype or device of its tensors; `_load_from_state_dict` loads what a state dict has for it,
under a prefix; `_step_supports_amp_scaling` of an optimizer makes a GradScaler give it `found_inf` and
`grad_scale`."""


def put_parameter(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Puts a parameter among those of a module, under a name that need not be possible for an attribute."""
    module._parameters[name] = parameter


def state_metadata(state: object) -> Any:
    """The versions of modules, by their prefixes, that torch notes on a state dict; None if it notes none."""
    return getattr(state, "_metadata", None)


def set_state_metadata(state: object, metadata: Mapping[str, Any]) -> None:
    """Gives a state dict the versions that `load_state_dict` looks for on it."""
    state._metadata = metadata  # type: ignore[attr-defined]


def load_symbolic_shapes() -> None:
    """Loads what torch loads, and sympy with it, in the first backward that is given a gradient.

    That takes a second or more, which the first caller of a worker would wait for.
    """
    name = "torch.fx.experimental.symbolic_shapes"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _unsupported(f"lacks {name}") from error


# -- the self-test


def _expect(behaviour: str, is_so: bool) -> None:
    if not is_so:
        raise _unsupported(f"behaves differently: {behaviour}")


def _memory() -> torch.Tensor:
    # Not memory of torch's own allocator, which reads its settings when it is first asked for some:
    # `tune_malloc` would come too late.
    return torch.frombuffer(bytearray(4), dtype=torch.float32)[0]


class _Probe(torch.autograd.Function):
    """forward: tokens -> token. backward: notes that it runs; hands its gradient on if it has several
    tokens."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[str], None], name: str, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.note = functools.partial(note, name)
        ctx.tokens = len(tokens)
        ctx.set_materialize_grads(False)
        return tokens[0].data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.note()
        return None, None, *[gradients[0] if ctx.tokens > 1 else None] * ctx.tokens


def _check_names() -> None:
    """What instances have that are made later, and what torch looks for in subclasses."""
    _find("torch.nn.Module._apply")
    _find("torch.nn.Module._load_from_state_dict")
    module = torch.nn.Module()
    if not isinstance(getattr(module, "_parameters", None), dict):
        raise _unsupported("lacks torch.nn.Module._parameters")
    if state_metadata(module.state_dict()) is None:
        raise _unsupported("lacks _metadata of a state dict")
    step: Any = inspect.unwrap(torch.amp.GradScaler.step)
    _expect(
        "a GradScaler does not look for _step_supports_amp_scaling of an optimizer",
        "_step_supports_amp_scaling" in step.__code__.co_consts,
    )


def _check_tensors() -> None:
    tensor, other = _memory(), _memory()
    before = version_of(tensor)
    tensor.view(1).zero_()
    _expect("a write to a view leaves the version of the tensor", version_of(tensor) > before)
    before = version_of(tensor)
    with preserving_versions((tensor,)):
        tensor.zero_()
    _expect("_unsafe_preserve_version_counter leaves another version", version_of(tensor) == before)
    _expect("views have other storages", storage_id(tensor) == storage_id(tensor.view(1)))
    _expect("tensors with memory of their own share a storage", storage_id(tensor) != storage_id(other))
    handle = tensor.requires_grad_().register_post_accumulate_grad_hook(print)  # type: ignore[no-untyped-call]
    hooks = post_accumulate_grad_hooks(tensor)
    _expect("hooks of a leaf are not in a dict", hooks is not None and list(hooks.values()) == [print])
    handle.remove()


def _check_stash() -> None:
    key, value = "gradwire.check", object()
    stash(key, value)
    _expect("what was stashed is not found", is_stashed(key) and stashed(key) is value)
    unstash(key)
    _expect("what was taken out of the stash is still there", not is_stashed(key))


def _run(check: Callable[[], None]) -> None:
    try:
        with torch.inference_mode(False), torch.enable_grad():
            check()
    except ImportError:
        raise
    except Exception as error:  # whatever another torch raises
        raise _unsupported(f"behaves differently: {type(error).__name__}: {error}") from error


@functools.cache
def check_engine() -> None:
    """Runs two tiny backwards, once in a process. Raises ImportError if the engine does not do what is
    relied on.

    The first backward of a process starts the engine's threads if there are devices, after which the
    process must not fork. So with a torch that is built for an accelerator this is not done by the import
    of gradwire, but when the process becomes a peer.
    """
    _run(_check_engine)


def _check_engine() -> None:
    key, value = "gradwire.check", object()
    ran: list[str] = []
    seen: list[tuple[int, bool, bool, bool]] = []
    leaf, gradient = _memory().requires_grad_(), _memory()
    leaf_node = get_gradient_edge(leaf).node  # kept: a leaf holds its node only weakly

    def note(name: str) -> None:
        is_found = is_stashed(key) and stashed(key) is value
        wanted = will_engine_execute_node(leaf_node)
        seen.append((current_graph_task_id(), wanted, graph_task_keeps_graph(), is_found))
        if not ran:
            queue_callback(lambda: ran.append("callback"))
        ran.append(name)

    early = apply_function(_Probe, note, "early", leaf)
    late = apply_function(_Probe, note, "late", leaf)
    root = apply_function(_Probe, note, "root", late, early)
    _expect(
        "nodes made later have lower numbers", sequence_number(early.grad_fn) < sequence_number(late.grad_fn)
    )
    set_sequence_number(early.grad_fn, 1)
    set_sequence_number(late.grad_fn, 0)
    _expect("a node does not keep the number that it was given", sequence_number(late.grad_fn) == 0)
    devices = [made.device.type for made in input_metadata(root.grad_fn)]
    _expect("a node does not know the device of its gradient", devices == ["cpu"])

    stash(key, value)
    try:
        engine_run_backward(
            (root,), (gradient,), True, False, (), allow_unreachable=True, accumulate_grad=True
        )
        order, in_backward = ran[:], seen[:]
        ran.clear()
        seen.clear()
        wanted = (GradientEdge(early.grad_fn, 0),)
        found = engine_run_backward(
            (root,), (gradient,), False, False, wanted, allow_unreachable=True, accumulate_grad=False
        )
    finally:
        unstash(key)
    _expect("a callback of the engine does not run last in a backward", order[-1:] == ["callback"])
    _expect("sequence numbers do not order the nodes", order[:-1] == ["root", "early", "late"])
    _expect("torch.autograd.grad runs other nodes", ran == ["root", "callback"] and found[0] is not None)
    ids, of_leaf, of_graph, of_stash = zip(*in_backward, *seen, strict=True)
    has_ids = len({-1, *ids}) == 3 and len(set(ids[:-1])) == 1
    _expect("a graph task has no number of its own", has_ids)
    is_backward = (True, True, True, False)
    _expect("_will_engine_execute_node does not tell backward from grad", of_leaf == is_backward)
    _expect("a node does not learn of retain_graph", of_graph == is_backward)
    _expect("the stash does not reach a node that runs", all(of_stash))


_run(_check_names)
_run(_check_tensors)
_run(_check_stash)
if torch.accelerator.current_accelerator() is None:
    check_engine()
