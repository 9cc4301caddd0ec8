"""Each target takes some inputs that were changed at random, and the fuzzer finds what is wrong.

`make fuzz` goes on from here, for as long as it is told.
"""

from __future__ import annotations

import json
from random import Random

import pytest
from tests.fuzz.inputs import join, load_corpus, split
from tests.fuzz.running import made
from tests.fuzz.targets import TARGETS
from tests.integration.daemons import run

INPUTS = 150


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_were_changed_are_read_or_refused(name: str) -> None:
    done = run("tests.fuzz.__main__", "--target", name, "--inputs", str(INPUTS))
    assert f"{INPUTS} inputs" in done.stdout, done.stderr
    assert "0 kinds of findings" in done.stdout, done.stdout


def test_every_kind_of_fault_is_found() -> None:
    done = run("tests.fuzz.planted")
    outcome = json.loads(done.stdout)
    (growth,) = [what for what in outcome["found"] if what.startswith("the process grew by ")]
    assert outcome["found"].pop(growth) is False  # that is of no single input
    (error,) = [what for what in outcome["found"] if what.startswith("KeyError at planted.py, line ")]
    assert outcome["found"].pop(error)
    assert outcome["found"] == {
        "ends the process: SIGABRT": True,
        "ends the process with exit code 7": True,
        "hangs for 10 s": True,
        "takes long": True,
        "takes much memory": True,
    }


@pytest.mark.parametrize("name", TARGETS)
def test_an_input_is_the_same_each_time(name: str) -> None:
    target, corpus = TARGETS[name](), load_corpus(name)
    inputs = [made(target, corpus, 1, number) for number in range(len(corpus) + 20)]
    assert inputs == [made(TARGETS[name](), corpus, 1, number) for number in range(len(corpus) + 20)]
    assert inputs != [made(target, corpus, 2, number) for number in range(len(corpus) + 20)]


def test_any_bytes_are_an_input() -> None:
    random = Random(0)
    for _ in range(200):
        content = random.randbytes(random.randrange(20))
        split(content)
        parts = tuple(random.randbytes(random.randrange(5)) for _ in range(random.randrange(1, 4)))
        assert split(join(parts)) == parts
