"""The same deaths as in `test_deaths` and `test_client_deaths`, where links go over the network."""

from __future__ import annotations

import pytest
from tests.faults.carriers import FLAGS, carrier_of
from tests.faults.test_client_deaths import pair, test_a_client_that_dies
from tests.faults.test_deaths import (
    number,
    test_a_worker_that_dies_in_a_call,
    test_a_worker_that_dies_in_a_large_transfer,
    test_a_worker_that_dies_in_an_optimizer_step,
    test_a_worker_that_dies_in_backward,
)
from tests.integration.conftest import Launch
from tests.integration.daemons import Daemon

import gradwire as gw

__all__ = [
    "number",
    "pair",
    "test_a_client_that_dies",
    "test_a_worker_that_dies_in_a_call",
    "test_a_worker_that_dies_in_a_large_transfer",
    "test_a_worker_that_dies_in_an_optimizer_step",
    "test_a_worker_that_dies_in_backward",
]


@pytest.fixture(scope="module", params=["tcp", "grpc"], autouse=True)
def carrier(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def launching(launch: Launch, carrier: str) -> Launch:
    def launch_so(module_source: str, *extra_args: str, **options: object) -> Daemon:
        daemon = launch(module_source, *extra_args, *FLAGS[carrier], "--grace", "1", **options)  # type: ignore[arg-type]
        with gw.connect(daemon.address) as worker:
            assert carrier_of(worker._link) == carrier
        return daemon

    return launch_so


@pytest.fixture
def launch(launch: Launch, carrier: str) -> Launch:
    return launching(launch, carrier)


@pytest.fixture(scope="module")
def module_launch(module_launch: Launch, carrier: str) -> Launch:
    return launching(module_launch, carrier)
