"""What is public is documented, and `__all__` says just that."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import gradwire
import gradwire_server

ROOT = Path(__file__).resolve().parents[2]
PUBLIC_MODULES = ["gradwire", "gradwire.errors", "gradwire.nn", "gradwire.optim", "gradwire_server"]


def _modules(package: ModuleType) -> list[str]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [module.name for module in found if ".proto." not in module.name and "__main__" not in module.name]


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_all_names_what_is_there_in_order_and_once(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert hasattr(module, public), public


@pytest.mark.parametrize("package", [gradwire, gradwire_server], ids=lambda package: package.__name__)
def test_a_package_has_no_public_names_beyond_all(package: ModuleType) -> None:
    visible = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert visible <= set(package.__all__), visible - set(package.__all__)


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_every_public_name_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{public}"
        if inspect.isclass(value) and value.__module__.startswith("gradwire"):
            for method, function in vars(value).items():
                if not method.startswith("_") and inspect.isfunction(function):
                    assert inspect.getdoc(getattr(value, method)), f"{name}.{public}.{method}"


@pytest.mark.parametrize("name", sorted(_modules(gradwire) + _modules(gradwire_server)))
def test_the_examples_in_docstrings_print_what_they_say(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not failed


def test_every_error_is_on_the_page_of_errors() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    bases = {"GradwireError", "LinkError", "CallRefused", "WireError"}
    missing = [name for name in gradwire.errors.__all__ if name not in bases and f"`{name}`" not in page]
    assert not missing
