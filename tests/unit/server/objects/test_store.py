"""The object store, where several threads use it at once."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import gradwire_server as gws
from gradwire_server.objects.store import ObjectStore


class Optimizer:
    def __init__(self, uid: str, *, is_prepared: bool = False) -> None:
        self.uid = uid
        self.is_prepared = is_prepared


class Growing(weakref.WeakSet[Any]):
    """Gets another optimizer in the middle of its first iteration, as another thread may add one."""

    def __init__(self, optimizer: Optimizer, late: Optimizer) -> None:
        super().__init__([optimizer])
        self._late = [late]

    def __iter__(self) -> Iterator[Any]:
        for optimizer in super().__iter__():
            if self._late:
                self.add(self._late.pop())
            yield optimizer


def test_optimizers_may_be_added_while_the_others_are_looked_through() -> None:
    for look, found in (
        (lambda store: store.has_prepared_steps, True),
        (lambda store: [optimizer.uid for optimizer in store.live_optimizers()], ["a", "b"]),
    ):
        a, b = Optimizer("a"), Optimizer("b", is_prepared=True)
        store = ObjectStore(1, itertools.count(1).__next__, lambda _: ())
        store.optimizers = Growing(a, b)
        assert look(store) == found


def test_a_worker_stops_if_an_optimizer_is_added_meanwhile() -> None:
    a, b = Optimizer("a"), Optimizer("b")
    worker = gws.Worker(print).start()
    worker._objects.optimizers = Growing(a, b)
    assert worker.stop()
