"""The scope of a request: what it has of the scope around it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from gradwire.runtime.compression import Compression
from gradwire.runtime.scope import Scope
from gradwire.wire.ids import ContextId

OF_THE_REQUEST: dict[str, Any] = {"context": ContextId(1, 2, 3), "detect_anomaly": True}
TAKEN_OVER: dict[str, Any] = {
    "peer": object(),
    "server_call": object(),
    "deadline": 12.5,
    "around_wait": nullcontext,
    "compression": Compression(),
}
LEFT_OUT: dict[str, Any] = {"waits_for_link": True}


def test_the_scope_of_a_request_has_every_field_that_it_should_have() -> None:
    """A new field belongs into one of the tables above, and then into `Scope.for_request`, or not."""
    around: dict[str, Any] = {**TAKEN_OVER, **LEFT_OUT, "context": None, "detect_anomaly": None}
    assert around.keys() == set(Scope._fields)
    made = Scope(**around).for_request(**OF_THE_REQUEST)
    for name, value in {**TAKEN_OVER, **OF_THE_REQUEST}.items():
        assert getattr(made, name) is value, name
    for name in LEFT_OUT:
        assert getattr(made, name) == getattr(Scope(), name), name
