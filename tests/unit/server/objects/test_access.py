"""Who may read parameters and who may change them, without any worker around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import gradwire_server.objects.access
from gradwire.runtime.scope import waiting
from gradwire_server.objects.access import ParameterAccess, ParameterSet

ONE, OTHER = ParameterSet(), ParameterSet()
FAR = 60.0


@pytest.fixture
def access() -> ParameterAccess:
    return ParameterAccess()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def until(condition: object) -> None:
    give_up_at = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def soon() -> float:
    return time.monotonic() + FAR


class TestReservations:
    def test_come_in_the_order_in_which_they_were_asked_for(
        self, access: ParameterAccess, pool: ThreadPoolExecutor
    ) -> None:
        served: list[int] = []

        def take(number: int) -> None:
            reservation = access.reserve(frozenset([ONE]), soon())
            assert reservation is not None
            with reservation:
                served.append(number)

        first = access.reserve(frozenset([ONE]), soon())
        assert first is not None
        asked = []
        for number in range(6):
            asked.append(pool.submit(take, number))
            until(lambda number=number: len(access._reservation_queue) == number + 1)
        first.close()
        for one in asked:
            one.result(20)
        assert served == list(range(6))

    def test_for_other_parameters_need_not_wait(self, access: ParameterAccess) -> None:
        first = access.reserve(frozenset([ONE]), soon())
        second = access.reserve(frozenset([OTHER]), time.monotonic())
        assert first is not None
        assert second is not None
        assert access.reserve(frozenset([ONE, OTHER]), time.monotonic()) is None

    def test_who_needs_more_is_not_passed_by_those_who_need_less(
        self, access: ParameterAccess, pool: ThreadPoolExecutor
    ) -> None:
        first = access.reserve(frozenset([ONE]), soon())
        assert first is not None
        both = pool.submit(access.reserve, frozenset([ONE, OTHER]), soon())
        until(lambda: len(access._reservation_queue) == 1)
        assert access.reserve(frozenset([OTHER]), time.monotonic()) is None
        first.close()
        assert both.result(20) is not None

    def test_a_place_is_kept_for_one_that_comes_again(
        self, access: ParameterAccess, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gradwire_server.objects.access, "_KEEP_PLACE_SECONDS", FAR)
        first = access.reserve(frozenset([ONE]), soon())
        assert first is not None
        assert access.reserve(frozenset([ONE]), time.monotonic(), "early") is None
        late = pool.submit(access.reserve, frozenset([ONE]), soon(), "late")
        until(lambda: len(access._reservation_queue) == 2)
        first.close()
        assert not late.done()
        early = access.reserve(frozenset([ONE]), time.monotonic(), "early")
        assert early is not None
        assert not late.done()
        early.close()
        assert late.result(20) is not None

    def test_a_place_of_one_that_does_not_come_again_is_given_up(
        self, access: ParameterAccess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gradwire_server.objects.access, "_KEEP_PLACE_SECONDS", 0.05)
        first = access.reserve(frozenset([ONE]), soon())
        assert first is not None
        assert access.reserve(frozenset([ONE]), time.monotonic(), "gone") is None
        first.close()
        assert access.reserve(frozenset([ONE]), soon(), "late") is not None
        assert not access._reservation_queue


class TestReadsAndWrites:
    def test_any_number_read_at_once_and_a_change_is_alone(
        self, access: ParameterAccess, pool: ThreadPoolExecutor
    ) -> None:
        lock = threading.Lock()
        readers, changers, most = 0, 0, 0

        def read() -> None:
            nonlocal readers, most
            for _ in range(100):
                with access.read([ONE]) or pytest.fail("there are parameters"):
                    with lock:
                        readers += 1
                        most = max(most, readers)
                    assert not changers
                    time.sleep(0)
                    with lock:
                        readers -= 1

        def change() -> None:
            nonlocal changers
            for _ in range(100):
                reservation = access.reserve(frozenset([ONE]), soon())
                assert reservation is not None
                with reservation, access.write(frozenset([ONE])):
                    changers += 1
                    assert changers == 1
                    assert not readers
                    time.sleep(0)
                    changers -= 1

        for done in [pool.submit(read) for _ in range(4)] + [pool.submit(change) for _ in range(3)]:
            done.result(60)
        assert most > 1
        assert not access._reads
        assert not access._writes

    def test_one_that_waits_for_another_process_lets_changes_be_made(
        self, access: ParameterAccess, pool: ThreadPoolExecutor
    ) -> None:
        def change() -> None:
            with access.write(frozenset([ONE])):
                pass

        reading = access.read([ONE])
        assert reading is not None
        with reading:
            waiting(lambda: pool.submit(change).result(20))
            assert reading in access._reads
        assert not reading.is_overtaken

    def test_one_within_another_does_not_wait_for_a_change_that_waits_for_the_other(
        self, access: ParameterAccess, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gradwire_server.objects.access, "_YIELD_TO_WRITE_SECONDS", FAR)

        def change() -> None:
            with access.write(frozenset([ONE, OTHER])):
                pass

        outer, inner = access.read([ONE]), access.read([OTHER])
        assert outer is not None
        assert inner is not None
        with outer:
            changing = pool.submit(change)
            until(lambda: access._writes)
            with inner:
                assert not changing.done()
                # Both are let go of in a wait, and are there again after it.
                waiting(lambda: changing.result(20))
                assert access._reads == {outer, inner}
        assert not outer.is_overtaken
        assert not inner.is_overtaken

    def test_one_that_another_waits_for_goes_ahead_of_a_change(
        self, access: ParameterAccess, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a module of a user that gathers several calls to compute them at once."""
        monkeypatch.setattr(gradwire_server.objects.access, "_YIELD_TO_WRITE_SECONDS", 0.05)

        def read() -> None:
            with access.read([ONE]) or pytest.fail("there are parameters"):
                pass

        def change() -> None:
            with access.write(frozenset([ONE])):
                pass

        reading = access.read([ONE])
        assert reading is not None
        with reading:
            changing = pool.submit(change)
            until(lambda: access._writes)
            pool.submit(read).result(20)
            assert not changing.done()
        changing.result(20)
        assert not reading.is_overtaken

    def test_changes_do_not_starve_where_somebody_always_reads(
        self, access: ParameterAccess, pool: ThreadPoolExecutor
    ) -> None:
        made = threading.Event()

        def read() -> None:
            while not made.is_set():
                with access.read([ONE]) or pytest.fail("there are parameters"):
                    time.sleep(0.001)

        reading = [pool.submit(read) for _ in range(5)]
        until(lambda: len(access._reads) > 1)
        try:
            for _ in range(20):
                with access.write(frozenset([ONE])):
                    pass
        finally:
            made.set()
        for one in reading:
            one.result(20)
