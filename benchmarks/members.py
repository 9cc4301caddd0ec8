"""The processes that are measured, seen from the coordinator and from inside.

A member answers commands over a pipe. It ends with the coordinator, whatever becomes of that.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext, ForkServerContext
from typing import Any, Protocol

from benchmarks.processes import die_with_parent

START_SECONDS = 60.0
END_SECONDS = 15.0
ANSWER_SECONDS = 120.0
"""How long a member may take for one command: the slowest takes seconds, on a loaded machine more."""

_PRELOADED = ["gradwire._public", "benchmarks.trainers", "torch.distributed.optim", "torch.distributed.rpc"]


class MemberFailed(RuntimeError):
    """A process of a contender raised, ended, or did not answer in time."""


class Answering(Protocol):
    """What runs in a member: its public methods are the commands."""

    def close(self) -> None: ...


class Member:
    """A process of a contender."""

    def __init__(
        self, label: str, make: Callable[..., Answering], *args: Any, environment: dict[str, str]
    ) -> None:
        self._label = label
        self._connection, inside = multiprocessing.Pipe()
        # A variable that counts when a process begins needs one that begins: those are not forked off one
        # that has loaded everything already, which saves seconds.
        context: BaseContext = multiprocessing.get_context("spawn") if environment else _fork_server()
        with _variables(environment):
            self._process = context.Process(target=_run, args=(inside, make, args), name=label)  # type: ignore[attr-defined]
            self._process.start()
        inside.close()

    @property
    def pid(self) -> int:
        pid: int = self._process.pid
        return pid

    def wait_until_ready(self) -> None:
        self.answer(START_SECONDS)

    def send_request(self, command: str, *args: Any) -> Any:
        """Has the member do something, and waits for the result."""
        self.tell(command, *args)
        return self.answer()

    def tell(self, command: str, *args: Any) -> None:
        """Begins to ask."""
        try:
            self._connection.send((command, args))
        except OSError as error:
            raise MemberFailed(f"{self._label} has ended") from error

    def has_answered(self, seconds: float) -> bool:
        """Waits a little."""
        return self._connection.poll(seconds)

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        """The answer to what it was told."""
        try:
            if not self._connection.poll(seconds):
                raise MemberFailed(f"{self._label} did not answer for {seconds:g} s")
            failure, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise MemberFailed(f"{self._label} has ended") from error
        if failure is not None:
            raise MemberFailed(f"{self._label} failed:\n{failure}")
        return value

    def begin_to_end(self) -> None:
        """Asks it to end; members of one world wait for each other."""
        try:
            self._connection.send(("close", ()))
        except OSError:
            pass  # it has

    def end(self, give_up_at: float) -> None:
        """Waits until it has ended, and ends it the hard way if it has not by then."""
        self._process.join(max(0.0, give_up_at - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_SECONDS)
        self._connection.close()


@contextmanager
def member(
    label: str, make: Callable[..., Answering], *args: Any, environment: dict[str, str] | None = None
) -> Iterator[Member]:
    """A member for the length of a block."""
    one = Member(label, make, *args, environment=environment or {})
    try:
        one.wait_until_ready()
        yield one
    finally:
        one.begin_to_end()
        one.end(time.monotonic() + END_SECONDS)


def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


@contextmanager
def _variables(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(connection: Connection, make: Callable[..., Answering], args: tuple[Any, ...]) -> None:
    die_with_parent()
    _let_the_fork_server_end()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator ends its members itself
    try:
        _answer(connection, make, args)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the coordinator is gone, and the other members with it


def _let_the_fork_server_end() -> None:
    """The fork server lives as long as anybody holds this descriptor, and members are to end with it.

    A stopped member would never let go of it.
    """
    descriptor = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    if descriptor is not None:
        os.close(descriptor)


def _answer(connection: Connection, make: Callable[..., Answering], args: tuple[Any, ...]) -> None:
    try:
        answering = make(*args)
    except BaseException:
        connection.send((traceback.format_exc(), None))
        return
    connection.send((None, None))
    command = ""
    while command != "close":
        command, command_args = connection.recv()
        failure, value = None, None
        try:
            value = getattr(answering, command)(*command_args)
        except BaseException:
            failure = traceback.format_exc()
        connection.send((failure, value))


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Looks again and again until it is so."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up_at:
            raise MemberFailed(f"{what}: not within {seconds:g} s")
        time.sleep(0.0005)
