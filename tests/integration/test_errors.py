"""What goes wrong on a worker is told to who called, in words that help."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import pytest
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
    with pytest.raises(gw.UnknownFunction, match="it serves: add, add_async"):
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
    with pytest.raises(gw.LinkError, match=r"no gradwire worker answered at 127\.0\.0\.1:1"):
        worker.call_nowhere()
