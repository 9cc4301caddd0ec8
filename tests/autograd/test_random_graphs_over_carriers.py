"""Random programs whose links go over another carrier, or over carriers that die meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.autograd.comparing import Both
from tests.autograd.conftest import places, served_places
from tests.autograd.test_random_graphs import Step, check, examples, programs
from tests.faults.carriers import FLAGS, SETTINGS, carrier_of, cut, cut_now_and_then

import gradwire as gw
from gradwire.transport import grpc_link


@pytest.fixture(scope="module", params=["unix", "tcp", "grpc"])
def carrier(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def addresses(carrier: str) -> Iterator[dict[str, str]]:
    with served_places(*FLAGS[carrier]) as addresses:
        yield addresses


@pytest.fixture
def trio(addresses: dict[str, str], carrier: str) -> Iterator[Both]:
    for address in addresses.values():
        with gw.connect(address) as worker:
            assert carrier_of(worker._link) == carrier
    with places(addresses) as both:
        yield both


@pytest.fixture
def dying_trio(
    addresses: dict[str, str], carrier: str, trio: Both, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Both]:
    """Sockets of all processes are cut all the time, between workers, too. Links go by whatever is left."""
    monkeypatch.setattr(grpc_link, "_AVOID_DIRECT_SECONDS", 0.0)  # they go back to direct sockets
    controls = [gw.connect(address, lost_after=60.0, **SETTINGS["grpc"]) for address in addresses.values()]
    with cut_now_and_then(1, places=[cut, *(control.cut for control in controls)]) as count:
        yield trio
    assert count[carrier] >= 20, count
    assert count["grpc"] >= 20, count
    for control in controls:
        control.close()


@examples(40)
@programs
def test_random_graphs_over_each_carrier(
    program: list[Step], used: list[int], backward: str, trio: Both
) -> None:
    check(program, used, backward, trio)


@pytest.mark.timeout(300)
@examples(40)
@programs
def test_random_graphs_over_carriers_that_die(
    program: list[Step], used: list[int], backward: str, dying_trio: Both
) -> None:
    check(program, used, backward, dying_trio)


@pytest.mark.slow
@pytest.mark.timeout(600)
@examples(500)
@programs
def test_many_random_graphs_over_carriers_that_die(
    program: list[Step], used: list[int], backward: str, dying_trio: Both
) -> None:
    check(program, used, backward, dying_trio)
