"""``python -m benchmarks``, as a person runs it: a small part, in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.peers.environments import Peer
from benchmarks.peers.measuring import measure
from benchmarks.peers.processes import PeerFailed
from benchmarks.processes import descendants_of

ROOT = Path(__file__).parents[2]
END_SECONDS = 60.0


@contextmanager
def benchmark(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks", "--output", str(tmp_path / "out.json"), *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_run_prints_the_ratios_and_writes_them(tmp_path: Path) -> None:
    with benchmark(tmp_path, "--quick", "--rows", "2", "--repetitions", "2") as process:
        out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "targets met" in out
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["machine"]["cores"] == os.cpu_count()
    measured = {one["contender"]: one for one in document["measurements"]}
    carried = {"gradwire": "tensorpipe", "gradwire-tcp": "tensorpipe-tcp", "gradwire-grpc": "tensorpipe-tcp"}
    assert set(measured) == {*carried, *carried.values(), "local"}
    assert [one["contender"] for one in document["comparisons"]] == list(carried)
    ratio = document["comparisons"][0]
    turns = zip(measured["gradwire"]["turn_medians"], measured["tensorpipe"]["turn_medians"], strict=True)
    assert ratio["ratio"] == pytest.approx(sum(ours / theirs for ours, theirs in turns) / 2)
    assert ratio["met"] == (ratio["ratio"] <= ratio["target"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_rows_in_circumstances_are_measured(tmp_path: Path) -> None:
    options = ("--rows", "14,15", "--contenders", "gradwire,tensorpipe", "--repetitions", "1")
    with benchmark(tmp_path, "--quick", *options) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    document = json.loads((tmp_path / "out.json").read_text())
    compared = [one["case"] for one in document["comparisons"]]
    assert compared == ["14-call", "14-backward", "15-call", "15-backward"]


def test_rows_of_fresh_processes_are_measured(tmp_path: Path) -> None:
    options = ("--rows", "16,17", "--contenders", "gradwire,tensorpipe", "--repetitions", "1")
    with benchmark(tmp_path, *options) as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    document = json.loads((tmp_path / "out.json").read_text())
    found = {(one["case"], one["contender"]): one["median"] for one in document["measurements"]}
    both = {(case, who) for case in ("16-connect", "16-first") for who in ("gradwire", "tensorpipe")}
    assert set(found) == both | {(case, "gradwire") for case in ("16-daemon", "17-cpu", "17-threads")}
    assert all(value > 0 for value in found.values())
    assert [one["case"] for one in document["comparisons"]] == ["16-connect", "16-first"]


def test_a_peer_is_measured_beside_gradwire_and_ends() -> None:
    itself = Peer("itself", "gradwire once more", "gradwire_worker", ())
    before = descendants_of(os.getpid())
    found = measure(itself, Path(sys.executable), turns=2)
    assert [one.case for one in found] == ["small call", "echo of 1 MB", "forward + backward"]
    assert all(len(one.theirs) == len(one.ours) == 2 and one.ratio.median > 0 for one in found)
    assert set(descendants_of(os.getpid())) <= set(before)


def test_a_peer_that_does_not_start_says_why() -> None:
    with pytest.raises(PeerFailed, match="No module named benchmarks.peers.no_module"):
        measure(Peer("none", "no peer", "no_module", ()), Path(sys.executable), turns=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with benchmark(tmp_path, "--rows", "1", "--repetitions", "100000") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "small call" in line:
                break
        members = descendants_of(process.pid)
        assert len(members) >= 4  # two trainers, two workers, and what started them
        process.send_signal(number)
        process.communicate(timeout=END_SECONDS)
        assert process.returncode == (-number if number is signal.SIGKILL else 130)
    give_up_at = time.monotonic() + END_SECONDS
    while left := [pid for pid in members if is_alive(pid)]:
        assert time.monotonic() < give_up_at, f"left behind: {left}"
        time.sleep(0.05)


def test_a_row_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with benchmark(tmp_path, "--rows", "18") as process:
        _, errors = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 2
    assert "rows are 1 to 17" in errors


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
