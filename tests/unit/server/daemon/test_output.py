"""Writing in the background: nobody waits, nothing is lost without a word."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from gradwire_server.daemon import output
from gradwire_server.daemon.output import BackgroundStream

DEADLINE = 60.0


class Pipe:
    """A pipe that is read when the test says so."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self.stream: TextIO = os.fdopen(writing, "w")
        self.dropped: list[int] = []
        self.background = BackgroundStream(self.stream, self._tell)

    def _tell(self, lines: int) -> None:
        self.dropped.append(lines)
        self.background.write(f"dropped {lines}\n")

    def read_until_end_of(self, last: str) -> list[str]:
        """Lines up to one, as soon as it is there."""
        text = ""
        while not text.endswith(f"{last}\n"):
            piece = os.read(self.reading, 65536)
            assert piece, text[-100:]
            text += piece.decode()
        return text.splitlines()

    def close(self) -> None:
        os.close(self.reading)
        self.background.finish(DEADLINE)  # what waits cannot be written any more
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_all_that_is_read_in_time_arrives_in_order(pipe: Pipe) -> None:
    for index in range(1000):
        print("line", index, file=pipe.background)
    assert pipe.read_until_end_of("line 999") == [f"line {index}" for index in range(1000)]
    pipe.background.finish(DEADLINE)
    assert pipe.dropped == []


def test_unfinished_lines_are_written_when_they_are_flushed(pipe: Pipe) -> None:
    print("50%", end="\r", flush=True, file=pipe.background)
    print("100%", end="", file=pipe.background)
    print(file=pipe.background)
    assert pipe.read_until_end_of("100%") == ["50%", "100%"]


def test_a_pipe_that_nobody_reads_makes_nobody_wait_and_what_is_missing_is_counted(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_MOST_CHARACTERS", 100_000)
    count = 10_000

    def write(thread: int) -> None:
        for index in range(count):
            pipe.background.write(f"{thread} {index} {'x' * 50}\n")

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    pipe.background.write("the last x\n")  # most likely dropped, too
    text, told, arrived = "", 0, 0
    while told + arrived < 4 * count + 1:
        text += os.read(pipe.reading, 1 << 20).decode()
        *lines, text = text.split("\n")
        arrived += sum(line.endswith("x") for line in lines)
        told += sum(int(line.split()[1]) for line in lines if line.startswith("dropped"))
    assert told + arrived == 4 * count + 1
    assert told == sum(pipe.dropped) > count


def test_the_end_waits_for_a_reader_but_not_for_ever(pipe: Pipe) -> None:
    for index in range(10_000):
        print(index, "x" * 50, file=pipe.background)
    began = time.monotonic()
    pipe.background.finish(0.2)
    assert time.monotonic() - began >= 0.2
    assert pipe.dropped, "what could not be written is told"
    assert sum(pipe.dropped) < 10_000


def test_a_reader_that_is_gone_disturbs_nobody() -> None:
    pipe = Pipe()
    os.close(pipe.reading)
    for index in range(100):
        print(index, file=pipe.background)
    pipe.background.finish(DEADLINE)
    assert sum(pipe.dropped) >= 100
    pipe.background.finish(DEADLINE)
    pipe.stream.close()


def test_it_is_otherwise_like_the_stream(pipe: Pipe) -> None:
    background = pipe.background
    assert background.fileno() == pipe.stream.fileno()
    assert background.encoding == pipe.stream.encoding
    assert background.buffer is pipe.stream.buffer
    assert not background.isatty()
    assert background.writable()


CHILDREN = """
import logging, multiprocessing, os, sys
from gradwire_server.daemon import logs

def work():
    print("the child prints")
    logging.warning("the child logs")

logs.configure("info", "text")
print("the parent prints")
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
print("the end", end="")
"""


def test_what_a_forked_child_writes_is_written_and_the_last_words_too() -> None:
    done = subprocess.run([sys.executable, "-c", CHILDREN], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["the child prints", "the end", "the parent prints"]
    assert done.stderr.count("the child logs") == 1
