"""Whether the connection to a worker is direct is what the kernel's tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.transport import addresses

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LOCAL, WORKER, PROXY = "0100007F:9C40", "0100007F:C383", "0100007F:1F90"
ESTABLISHED, TIME_WAIT = "01", "06"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    table = tmp_path / "tcp"
    monkeypatch.setattr(addresses, "_TABLES", (str(tmp_path / "none"), str(table)))
    return table


def write(table: Path, *rows: tuple[str, str, str]) -> None:
    lines = [
        f"   {number}: {local} {remote} {state} 0 0 0" for number, (local, remote, state) in enumerate(rows)
    ]
    table.write_text(HEADER + "\n".join(lines) + "\n")


def remote() -> addresses.Address | None:
    return addresses.remote_of("ipv4:127.0.0.1:40000", "127.0.0.1:50051")


def test_a_direct_connection_is_found(table: Path) -> None:
    write(table, (PROXY, LOCAL, ESTABLISHED), (LOCAL, WORKER, ESTABLISHED))
    assert remote() == ("127.0.0.1", 50051)


def test_what_is_left_of_an_earlier_connection_from_the_same_port_does_not_count(table: Path) -> None:
    write(table, (LOCAL, PROXY, TIME_WAIT), (LOCAL, PROXY, ESTABLISHED), (LOCAL, WORKER, ESTABLISHED))
    assert remote() == ("127.0.0.1", 50051)
    write(table, (LOCAL, WORKER, TIME_WAIT))
    assert remote() is None


def test_a_proxy_is_no_direct_connection(table: Path) -> None:
    write(table, (LOCAL, PROXY, ESTABLISHED))
    assert remote() is None


def test_without_a_table_nothing_is_direct(table: Path) -> None:
    assert remote() is None
