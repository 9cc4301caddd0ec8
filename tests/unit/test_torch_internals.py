"""The private names of torch are in one module, which refuses a torch that lacks one or in which one behaves
differently."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire import torch_internals

ROOT = Path(__file__).parents[2]
OWN_FILE = Path(inspect.getfile(torch_internals))
NAMES = sorted(set(re.findall(r'"(torch(?:\.\w+)+)"', OWN_FILE.read_text())))

# -- what happens with another torch

PRELUDE = """
import importlib, json, sys
from contextlib import contextmanager

import torch


def without(owner, name):
    class Without:
        def __getattr__(self, asked):
            if asked == name:
                raise AttributeError(asked)
            return getattr(owner, asked)

        def __call__(self, *args):
            return owner(*args)

    return Without()


@contextmanager
def broken(path, replacement=None):
    '''A name of torch is gone, or is something else.'''
    *names, name = path.split(".")[1:]
    if path == "torch.fx.experimental.symbolic_shapes":
        assert path not in sys.modules
        sys.modules[path] = None
        yield
        del sys.modules[path]
        return
    owners = [torch]
    for each in names:
        owners.append(getattr(owners[-1], each))
    owner = owners[-1]
    assert hasattr(owner, name), path
    if replacement is None and names:
        holder, held = owners[-2], names[-1]
        new = without(owner, name)
    else:
        holder, held, new = owner, name, replacement
    own = vars(holder).get(held, holder)
    delattr(holder, held) if new is None else setattr(holder, held, new)
    try:
        yield
    finally:
        # What a class only inherited is visible again when what hid it is gone.
        delattr(holder, held) if own is holder else setattr(holder, held, own)


def refusal():
    '''What the import of the module says; an empty string if it takes this torch.'''
    sys.modules.pop("gradwire.torch_internals", None)
    try:
        module = importlib.import_module("gradwire.torch_internals")
        module.load_symbolic_shapes() if sys.modules.get(SHAPES, module) is None else None
    except ImportError as error:
        return str(error)
    return ""


SHAPES = "torch.fx.experimental.symbolic_shapes"
"""


def fresh(program: str) -> Any:
    """What a program prints, as JSON, that runs in an interpreter of its own."""
    source = PRELUDE + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_a_torch_without_one_of_the_names_is_refused() -> None:
    refusals = fresh(f"""
        found = {{}}
        for path in {NAMES}:
            with broken(path):
                found[path] = refusal()
        assert refusal() == ""
        print(json.dumps(found))
    """)
    beginning = re.escape(
        f"this version of gradwire needs torch >= {torch_internals.OLDEST_TORCH} (tested up to "
        f"{torch_internals.NEWEST_TORCH}); torch {torch.__version__} lacks "
    )
    assert len(refusals) == len(NAMES) > 30
    assert {path for path, said in refusals.items() if not re.fullmatch(beginning + path, said)} == set()


BEHAVIOURS = {
    "torch._C._current_graph_task_id": ("lambda: -1", "no number of its own"),
    "torch._C._will_engine_execute_node": ("lambda node: True", "does not tell backward from grad"),
    "torch._C._autograd._get_current_graph_task_keep_graph": (
        "lambda: True",
        "does not learn of retain_graph",
    ),
    "torch._C._get_obj_in_tls": ("lambda key: None", "what was stashed is not found"),
    "torch._C._remove_obj_from_tls": ("lambda key: None", "is still there"),
    "torch.Tensor._version": ("property(lambda self: 0)", "leaves the version"),
    "torch.Tensor._post_accumulate_grad_hooks": ("property(lambda self: None, lambda *_: None)", "TypeError"),
    "torch.UntypedStorage._cdata": ("property(lambda self: 0)", "share a storage"),
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": ("nullcontext", "leaves another version"),
    "torch.autograd.function.BackwardCFunction._sequence_nr": ("lambda self: 0", "lower numbers"),
    "torch.autograd.function.BackwardCFunction._set_sequence_nr": (
        "lambda self, number: None",
        "does not keep",
    ),
    "torch.autograd.function.BackwardCFunction._input_metadata": ("()", "does not know the device"),
    "torch.amp.GradScaler.step": ("lambda self, optimizer: None", "_step_supports_amp_scaling"),
}


def test_a_torch_in_which_one_behaves_differently_is_refused() -> None:
    refusals = fresh(f"""
        from contextlib import nullcontext

        found = {{}}
        for path, (replacement, _) in {BEHAVIOURS}.items():
            with broken(path, eval(replacement)):
                found[path] = refusal()
        assert refusal() == ""
        print(json.dumps(found))
    """)
    for path, (_, expected) in BEHAVIOURS.items():
        said = refusals[path]
        assert re.search(f"behaves differently: .*{expected}", said), (path, said)


def test_an_engine_that_orders_nodes_or_callbacks_differently_is_refused() -> None:
    never, at_once, unordered = fresh("""
        class Engine:
            def __init__(self, queue_callback):
                self.queue_callback = queue_callback
                self.run_backward = torch.autograd.Variable._execution_engine.run_backward

        said = []
        for queue_callback in (lambda callback: None, lambda callback: callback()):
            with broken("torch.autograd.Variable._execution_engine", Engine(queue_callback)):
                said.append(refusal())
        # Nodes say that they have the numbers that they were given, but the engine does not know of them.
        numbers = {}
        node = torch.autograd.function.BackwardCFunction
        real = node._sequence_nr
        with broken("torch.autograd.function.BackwardCFunction._set_sequence_nr", numbers.__setitem__):
            with broken(
                "torch.autograd.function.BackwardCFunction._sequence_nr",
                lambda self: numbers.get(self, real(self)),
            ):
                node._set_sequence_nr = lambda self, number: numbers.__setitem__(self, number)
                said.append(refusal())
        print(json.dumps(said))
    """)
    assert "a callback of the engine does not run last in a backward" in never
    assert "a callback of the engine does not run last in a backward" in at_once
    assert "sequence numbers do not order the nodes" in unordered


def test_the_self_test_leaves_nothing_behind() -> None:
    left = fresh("""
        import gc, threading

        def state():
            gc.collect()
            tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
            return [
                threading.active_count(), tensors, torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
                torch._C._is_key_in_tls("gradwire.check"), SHAPES in sys.modules,
            ]

        states = []
        for around in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with around():
                before = state()
                assert refusal() == ""
                states.append([before, state()])
        print(json.dumps(states))
    """)
    assert all(before == after for before, after in left), left


def test_with_an_accelerator_the_engine_starts_only_when_the_process_becomes_a_peer() -> None:
    """With devices, the first backward starts threads, and the process must not fork any more."""
    at_import, as_peer = fresh("""
        torch.accelerator.current_accelerator = lambda: torch.device("cuda")
        with broken("torch._C._current_graph_task_id", lambda: -1):
            at_import = refusal()
            from gradwire.peers.local import LocalPeer

            try:
                LocalPeer()
                as_peer = ""
            except ImportError as error:
                as_peer = str(error)
        print(json.dumps([at_import, as_peer]))
    """)
    assert at_import == ""
    assert "no number of its own" in as_peer


# -- what is claimed


def test_the_range_of_torch_is_the_one_that_pyproject_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (claimed,) = (one for one in project["dependencies"] if re.match(r"torch\b", one))
    major, minor = torch_internals.NEWEST_TORCH.split(".")
    assert claimed == f"torch>={torch_internals.OLDEST_TORCH},<{major}.{int(minor) + 1}"


def test_the_newest_torch_is_the_one_that_development_uses() -> None:
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned == torch_internals.NEWEST_TORCH


# -- nobody else uses private names


@cache
def private_names() -> frozenset[str]:
    """The private attributes of torch's objects that gradwire has in its hands."""
    leaf = torch.ones((), requires_grad=True)
    objects: tuple[object, ...] = (torch.nn.Module(), torch.optim.SGD([leaf]), torch.autograd.Function, leaf)
    objects += (leaf.untyped_storage(), (leaf * 2).grad_fn, torch.autograd.Function._backward_cls)
    names = {name for one in objects for name in dir(one)} | {"_metadata", *torch_internals.OVERRIDDEN}
    return frozenset(name for name in names if re.match(r"_[^_]", name))


def own_names(tree: ast.AST) -> set[str]:
    """Private attributes that the classes of a module have by their own definition."""
    names = set()
    for part in ast.walk(tree):
        if isinstance(part, ast.FunctionDef):
            names.add(part.name)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            if ast.unparse(part.value) == "self":
                names.add(part.attr)
        elif isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "__slots__":
            names |= {one.value for one in ast.walk(part.value) if isinstance(one, ast.Constant)}
    return names


def defined_in(part: ast.stmt) -> str:
    """The name that a statement of a class body defines."""
    if isinstance(part, ast.FunctionDef):
        return part.name
    targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
    return targets[0].id if isinstance(targets[0], ast.Name) else ""


def uses_of_private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of what a module should leave to torch_internals."""
    foreign = private_names() - own_names(tree)
    for part in ast.walk(tree):
        if isinstance(part, ast.Import | ast.ImportFrom):
            package = f"{part.module}." if isinstance(part, ast.ImportFrom) else ""
            for name in (package + alias.name for alias in part.names):
                if re.match(r"torch\..*(\b_|\bexperimental\b)", name):
                    yield part.lineno, name
        elif isinstance(part, ast.Attribute):
            of = ast.unparse(part.value)
            if part.attr in foreign or re.fullmatch(r"torch(\.\w+)*\._[^_]\w*", f"{of}.{part.attr}"):
                yield part.lineno, f"{of}.{part.attr}"
        elif isinstance(part, ast.Constant) and part.value in foreign:
            yield part.lineno, repr(part.value)
        elif isinstance(part, ast.Call) and ast.unparse(part).startswith("super(torch."):
            yield part.lineno, ast.unparse(part)
        elif isinstance(part, ast.ClassDef) and any("torch." in ast.unparse(base) for base in part.bases):
            for statement in part.body:
                if defined_in(statement) in private_names() - {*torch_internals.OVERRIDDEN}:
                    yield statement.lineno, f"{part.name}.{defined_in(statement)}"


def modules() -> list[Path]:
    found = [*(ROOT / "client").rglob("*.py"), *(ROOT / "server").rglob("*.py")]
    apart = ("proto", OWN_FILE.name)
    return sorted(path for path in found if not set(path.parts) & set(apart))


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    used = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules()
        for line, name in uses_of_private_names(ast.parse(path.read_text()))
    ]
    assert not used, "\n".join(used)


@pytest.mark.parametrize(
    "line",
    [
        "from torch.autograd.graph import _engine_run_backward",
        "from torch.utils._pytree import tree_map_only",
        "import torch._dynamo",
        "import torch.fx.experimental.symbolic_shapes",
        "torch._C._current_graph_task_id()",
        "torch.ops.aten._sparse_coo_tensor_unsafe.default(1)",
        "parameter._version",
        "tensors[0].untyped_storage()._cdata",
        "node._sequence_nr()",
        "leaf._post_accumulate_grad_hooks",
        "state._metadata",
        "self._parameters['x']",
        "getattr(tensor, '_values')()",
        "super(torch.autograd.Function, function).apply",
        "class Part(torch.nn.Module):\n    def _named_members(self): ...",
    ],
)
def test_that_check_finds_each_way_to_use_one(line: str) -> None:
    assert list(uses_of_private_names(ast.parse(line)))
