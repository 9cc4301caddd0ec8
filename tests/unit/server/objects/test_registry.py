"""What is exposed is served by its name; what is defined anew takes its own place, and no other's."""

from __future__ import annotations

import gc
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import gradwire_server as gws
from gradwire_server.objects.exposing import exposed_in
from gradwire_server.objects.registry import Registry

Import = Callable[[str, str], ModuleType]

LAYERS = """
import dataclasses, enum
import gradwire_server as gws

@gws.expose
def double(x):
    return {factor} * x

@gws.expose(name="half")
def _half(x):
    return x / {factor}

@gws.expose
class Layer:
    factor = {factor}

@gws.expose
@dataclasses.dataclass
class Point:
    x: int = {factor}

@gws.expose
class Color(enum.Enum):
    RED = {factor}

shared = gws.expose(Layer(), name="shared")
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Writes a module and imports it, or imports it again if that was done before."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which would be taken for that of the new source
    loaded = []

    def load(name: str, source: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        loaded.append(name)
        return importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)

    yield load
    for name in loaded:
        sys.modules.pop(name, None)


def test_a_module_that_is_loaded_again_is_served_as_it_is_now(load: Import) -> None:
    before = load("reloaded_layers", LAYERS.format(factor=2)).Layer
    module = load("reloaded_layers", LAYERS.format(factor=3))
    assert before is not module.Layer
    registry = Registry([module])
    assert registry.names == ("Layer", "double", "half", "shared")
    assert registry.function("double", "w").value(1) == 3
    assert registry.function("half", "w").value(6) == 2
    assert registry.exposed_class("Layer") is module.Layer
    assert registry.instances["shared"] is module.shared
    assert registry.types.type_of("Point") is module.Point
    assert [type_.name for type_ in registry.describe_types()] == ["Color", "Point"]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module whose source is run in it, again and again."""
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", module)
    return module


def test_a_cell_that_is_run_again_is_served_as_it_is_now(notebook: ModuleType) -> None:
    for factor in (2, 3, 4):
        exec(LAYERS.format(factor=factor), vars(notebook))
    served = dict(exposed_in(notebook))
    assert sorted(served) == ["Color", "Layer", "Point", "double", "half", "shared"]
    assert served["double"](1) == 4
    assert served["shared"] is notebook.shared


def test_a_running_worker_and_a_new_one_serve_what_they_were_made_with(notebook: ModuleType) -> None:
    registries = []
    for factor in (2, 3):
        exec(LAYERS.format(factor=factor), vars(notebook))
        registries.append(Registry([notebook.double]))
    assert [registry.function("double", "w").value(1) for registry in registries] == [2, 3]


def test_a_module_that_imported_the_old_definition_is_still_served(load: Import) -> None:
    layers = load("imported_layers", LAYERS.format(factor=2))
    app = load("app_of_layers", "from imported_layers import double, Layer\n")
    load("imported_layers", LAYERS.format(factor=3))
    assert [name for name, _ in exposed_in(app)] == ["Layer", "double"]
    for served in ([layers, app], [app, layers]):
        assert Registry(served).function("double", "w").value(1) == 3


@pytest.mark.parametrize(
    "second",
    [
        "@gws.expose(name='double')\ndef another(x): ...",
        "gws.expose(object, name='double')",
        "gws.expose([], name='double')",
    ],
)
def test_two_different_things_of_one_name_are_refused(load: Import, second: str) -> None:
    module = load(f"twice_{abs(hash(second))}", LAYERS.format(factor=2) + second)
    with pytest.raises(ValueError, match="two different things are exposed as 'double'"):
        Registry([module])


def test_objects_of_one_class_that_two_modules_expose_by_one_name_are_refused(load: Import) -> None:
    source = (
        "import collections\nimport gradwire_server as gws\ngws.expose(collections.Counter(), name='box')\n"
    )
    modules = [load(name, source) for name in ("first_box", "second_box")]
    with pytest.raises(ValueError, match="two different things are exposed as 'box'"):
        Registry(modules)


def test_an_object_that_was_exposed_anew_is_let_go() -> None:
    class Model:
        pass

    references = []
    for _ in range(3):
        model = gws.expose(Model(), name="model_of_a_cell")
        references.append(weakref.ref(model))
    del model
    gc.collect()
    assert [reference() is None for reference in references] == [True, True, False]
