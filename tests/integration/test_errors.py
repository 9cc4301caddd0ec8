"""What goes wrong on a worker is told to who called, in words that help."""

from __future__ import annotations

import dataclasses
import enum
import traceback
from collections.abc import Iterator

import pytest
import torch
from tests.conftest import Workers

import gradwire as gw


@pytest.fixture
def worker(workers: Workers) -> Iterator[gw.RemoteWorker]:
    with gw.connect(workers.a) as worker:
        yield worker


@pytest.mark.parametrize("type_", [ValueError, KeyError, ZeroDivisionError, OSError])
def test_a_builtin_error_is_caught_as_what_it_is(worker: gw.RemoteWorker, type_: type[Exception]) -> None:
    with pytest.raises(type_) as caught:
        worker.fail(type_.__name__, "it failed")
    assert isinstance(caught.value, gw.RemoteError)
    assert caught.value.remote_type == f"builtins.{type_.__name__}"
    assert "it failed" in str(caught.value)
    assert caught.value.worker == "a"


def test_an_error_of_an_unknown_type_is_caught_as_the_builtin_that_it_derives_from(
    worker: gw.RemoteWorker,
) -> None:
    with pytest.raises(LookupError, match=r"functions\.Own: it failed") as caught:
        worker.fail("Own")
    assert isinstance(caught.value, gw.RemoteError)
    assert caught.value.remote_type == "functions.Own"


def test_the_remote_traceback_is_shown_with_the_error(worker: gw.RemoteWorker) -> None:
    with pytest.raises(ValueError, match="the effect") as caught:
        worker.fail_with_cause()
    assert isinstance(caught.value, gw.RemoteError)
    shown = "".join(traceback.format_exception(caught.value))
    for text in (
        "Traceback of the worker on a",
        "functions.py",
        'raise KeyError("the cause")',
        "The above exception was the direct cause",
        "ValueError: the effect",
        f"while calling fail_with_cause on {worker.target}",
    ):
        assert text in shown
    assert caught.value.__notes__[0] == "a note from afar"
    assert shown.count("a note from afar") == 1
    # The worker's own machinery is not what the user wants to read about.
    assert "servicer.py" not in caught.value.remote_traceback


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
def test_a_function_that_exits_does_not_end_the_worker(worker: gw.RemoteWorker, kind: str) -> None:
    before = worker.process()
    with pytest.raises(gw.RemoteError, match=kind):
        worker.fail(kind)
    assert worker.process() == before


def test_an_error_from_further_on_keeps_its_type_and_both_tracebacks(workers: Workers) -> None:
    with gw.connect(workers.a) as worker:
        with pytest.raises(ZeroDivisionError, match="it failed") as caught:
            worker.call_on(workers.b, "fail", "ZeroDivisionError")
    error = caught.value
    assert isinstance(error, gw.RemoteError)
    assert error.remote_type == "builtins.ZeroDivisionError"
    assert str(error) == "ZeroDivisionError: it failed"
    assert "in call_on" in error.remote_traceback
    assert "in fail" in error.remote_traceback
    assert error.worker == "b"


def test_an_error_from_far_further_on_is_still_the_same(workers: Workers) -> None:
    a, b = workers.a, workers.b
    with gw.connect(a) as worker, pytest.raises(LookupError, match=r"functions\.Own: it failed") as caught:
        worker.call_on(b, "call_on", a, "call_on", b, "fail", "Own")
    assert isinstance(caught.value, gw.RemoteError)
    assert caught.value.remote_traceback.count("in call_on") == 3
    assert str(caught.value) == "functions.Own: it failed"


def test_an_unknown_function_is_refused_with_suggestions(worker: gw.RemoteWorker) -> None:
    with pytest.raises(gw.UnknownFunction, match="did you mean double") as caught:
        worker.duble(3)
    assert caught.value.suggestions[0] == "double"
    assert isinstance(caught.value, LookupError)


def test_a_function_unlike_any_other_is_refused_with_what_there_is(worker: gw.RemoteWorker) -> None:
    with pytest.raises(gw.UnknownFunction, match="it serves: Named, .*add, add_async"):
        worker.call("zzzzzzzzzzzz")


@pytest.mark.parametrize("name", ["__import__", "os.system", "_event", "", "echo.__globals__"])
def test_what_is_not_exposed_cannot_be_called(worker: gw.RemoteWorker, name: str) -> None:
    with pytest.raises(gw.UnknownFunction):
        worker.call(name)


def test_wrong_arguments_are_refused_before_anything_runs(worker: gw.RemoteWorker) -> None:
    name = "test_wrong_arguments"
    with pytest.raises(gw.WrongArguments, match=r"its signature is count\(name: .?str.?\) -> .?int.?"):
        worker.count(name, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nome'"):
        worker.count(name, nome=name)
    assert worker.count(name) == 1


def test_a_result_that_cannot_travel_is_told_by_its_path(worker: gw.RemoteWorker) -> None:
    with pytest.raises(gw.Unencodable, match=r"result\[.here.\]\[0\]"):
        worker.unencodable()


def test_a_huge_message_of_an_error_arrives_shortened(worker: gw.RemoteWorker) -> None:
    with pytest.raises(ValueError, match="characters left out"):
        worker.fail("ValueError", "x" * 10_000_000)


def test_an_error_text_that_is_no_unicode_arrives(worker: gw.RemoteWorker) -> None:
    with pytest.raises(gw.UnknownFunction):
        worker.call("no such function \u20ac\n")


def test_a_worker_that_cannot_be_reached_further_on_is_named(worker: gw.RemoteWorker) -> None:
    with pytest.raises(
        gw.ConnectFailed, match=r"^on a: no gradwire worker responded at 127\.0\.0\.1:1"
    ) as caught:
        worker.call_nowhere()
    assert caught.value.worker == "127.0.0.1:1"
    assert caught.value.retryable


def test_a_worker_that_cannot_be_reached_far_further_on_is_told_by_who_tried(workers: Workers) -> None:
    with gw.connect(workers.a) as worker, pytest.raises(gw.ConnectFailed) as caught:
        worker.call_on(workers.b, "call_nowhere")
    assert str(caught.value).startswith("on b: no gradwire worker responded at 127.0.0.1:1")
    assert caught.value.__notes__ == [
        f"while calling call_nowhere on {workers.b}",
        f"while calling call_on on {workers.a}",
    ]


def test_a_handle_that_a_function_closed_itself_is_no_lost_worker(workers: Workers) -> None:
    with (
        gw.connect(workers.a) as worker,
        pytest.raises(gw.LinkClosed, match="^on a: this handle to") as caught,
    ):
        worker.use_closed(workers.b)
    assert not caught.value.retryable


@dataclasses.dataclass
class NotExposed:
    x: int


class NotExposedEither(enum.Enum):
    RED = 1


@pytest.mark.parametrize("value", [NotExposed(1), NotExposedEither.RED])
def test_a_type_that_the_worker_does_not_know_is_a_type_error_that_says_what_to_do(
    worker: gw.RemoteWorker, value: object
) -> None:
    name = type(value).__qualname__
    with pytest.raises(
        TypeError, match=rf"knows no type '{name}'.*expose it with @gradwire_server\.expose"
    ) as caught:
        worker.echo([value])
    assert type(caught.value) is gw.TypeMismatch
    assert caught.value.worker == "a"
    assert str(caught.value).startswith("args[0]: ")
    assert not caught.value.retryable


def test_parameters_that_are_called_as_gradwires_own_get_what_is_meant_for_them(
    worker: gw.RemoteWorker,
) -> None:
    given = {"timeout": 5.0, "name": "n", "stale": "s", "self": 7}
    expected = (5.0, "n", "s", 7)
    assert worker.own_timeout(**given) == expected
    assert worker.call("own_timeout", gw.Keywords(**given)) == expected
    assert worker.call("own_timeout", gw.Keywords(**given), timeout=30) == expected
    assert worker.call_async("own_timeout", gw.Keywords(**given), timeout=30).result() == expected
    assert worker.remote("own_timeout", gw.Keywords(**given), timeout=30).fetch() == expected
    assert worker.call("own_timeout", 5.0, gw.Keywords(name="n"), stale="s", self=7) == expected
    # The pleasant form means gradwire's own.
    assert worker.call("own_timeout", timeout=30.0) == (0.0, "", "", 0)


def test_a_class_may_have_parameters_that_are_called_as_gradwires_own(worker: gw.RemoteWorker) -> None:
    made = worker.create("Named", gw.Keywords(name="Ada", stale="bread", timeout=1.0), name="named one")
    try:
        assert made.name == "named one"
        assert made.given() == ("Ada", "bread", 1.0)
        assert made.wait(timeout=2.0) == 2.0
        assert made.call("wait", gw.Keywords(timeout=3.0), timeout=30) == 3.0
        assert made.call_async("wait", gw.Keywords(timeout=4.0)).result() == 4.0
    finally:
        made.delete()


def test_keywords_that_come_twice_or_elsewhere_are_refused(worker: gw.RemoteWorker) -> None:
    with pytest.raises(TypeError, match="given twice.*: scale"):
        worker.call("add", 1, gw.Keywords(scale=2), scale=3)
    with pytest.raises(TypeError, match=r"args\[0\]"):
        worker.call("add", gw.Keywords(scale=2), 1)


def test_a_module_has_the_methods_of_its_class_and_says_so_of_others(worker: gw.RemoteWorker) -> None:
    plain = worker.create("Plain")
    with pytest.raises(AttributeError, match=rf"Plain on {worker.target} has no method 'remote'"):
        plain.remote(3)
    with pytest.raises(AttributeError, match="has no method 'frobnicate'"):
        plain.frobnicate()
    assert not hasattr(plain, "remote")
    assert worker.create("WithRemote").remote(3) == 3
    # What stands for the parameters is still found as torch finds those of a local module.
    ((name, parameter),) = torch.nn.Sequential(plain).named_parameters()
    assert torch.nn.Sequential(plain).get_parameter(name) is parameter
