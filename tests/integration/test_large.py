"""Tensors of any size, without more memory than they need."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from tests.conftest import Workers

import gradwire as gw

MB = 1 << 20


def test_a_large_tensor_goes_there_and_back(workers: Workers) -> None:
    x = torch.arange(300 * MB // 4, dtype=torch.int32)
    with gw.connect(workers.a) as worker:
        assert torch.equal(worker.same(x), x)


def test_a_small_call_is_answered_amid_a_large_one(workers: Workers) -> None:
    with gw.connect(workers.a) as worker:
        large = worker.call_async("same", torch.zeros(128 * MB, dtype=torch.uint8))
        for number in range(5):
            assert worker.double(number) == 2 * number
        assert not large.done()
        assert large.result().shape == (128 * MB,)


def test_a_tensor_modified_while_it_is_sent_is_refused_and_nothing_runs(workers: Workers) -> None:
    with gw.connect(workers.a) as worker:
        x = torch.zeros(256 * MB, dtype=torch.uint8)
        future = worker.call_async("total", x)
        x.add_(1)
        with pytest.raises(gw.Unencodable, match="modified in place while being sent"):
            future.result(60)
        assert worker.double(1) == 2


def test_a_tensor_modified_after_the_answer_does_no_harm(workers: Workers) -> None:
    with gw.connect(workers.a) as worker:
        x = torch.ones(8 * MB, dtype=torch.uint8)
        assert worker.total(x) == 8 * MB
        x.zero_()
        assert worker.total(x) == 0


SCRIPT = textwrap.dedent(
    """
    import json, sys, torch, gradwire as gw
    torch.set_num_threads(1)

    def memory():
        lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
        return [int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")]

    def shared():
        # What is mapped at both ends counts at both.
        pages, inside = 0, False
        for line in open("/proc/self/smaps"):
            if "-" in line.split(" ", 1)[0]:
                inside = "/memfd:gradwire" in line
            elif inside and line.startswith("Rss:"):
                pages += int(line.split()[1])
        return pages * 1024

    target, function, size, same_host = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
    with gw.connect(target, same_host=same_host) as worker:
        # What is set up once, on both sides, is not what is measured.
        worker.total(torch.ones(1 << 20))
        worker.same(torch.ones(1 << 20))
        x = None if function == "zeros" else torch.ones(size // 4)
        open("/proc/self/clear_refs", "w").write("5")
        client_before, shared_before = memory()[0], shared()
        worker_before = worker.peak_memory(True)[0]
        result = worker.call(function, size if x is None else x)
        worker_most = worker.peak_memory()[1]
        extra = {"client": memory()[1] - client_before, "worker": worker_most - worker_before}
        print(json.dumps({**extra, "shared": shared() - shared_before}))
    """
)


@pytest.mark.parametrize("same_host", [False, True])
@pytest.mark.parametrize(
    ("function", "client_copies", "worker_copies"), [("total", 0, 1), ("zeros", 1, 1), ("same", 1, 1)]
)
def test_a_tensor_needs_its_own_memory_and_little_more(
    workers: Workers, function: str, client_copies: int, worker_copies: int, same_host: bool
) -> None:
    size = 128 * MB
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, workers.b, function, str(size), str(same_host)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    extra = json.loads(done.stdout)
    if same_host:
        both = extra["client"] + extra["worker"] - extra["shared"]
        assert both <= (client_copies + worker_copies) * 1.1 * size + 64 * MB, extra
    else:
        assert extra["client"] <= client_copies * 1.1 * size + 64 * MB, extra
        assert extra["worker"] <= worker_copies * 1.1 * size + 64 * MB, extra
