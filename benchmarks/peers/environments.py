"""The peers, and an environment of its own for each: gradwire's stays as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "CannotInstall", "Peer", "python_of"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-peers"
INSTALL_SECONDS = 1800.0


class CannotInstall(Exception):
    """A peer that cannot be had here. The message says why."""


@dataclass(frozen=True)
class Peer:
    """What one would use in the place of gradwire."""

    name: str
    label: str
    module: str
    """In this package: what runs in its environment."""
    requirements: tuple[str, ...]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ray", "Ray actor", "ray_actor", ("ray==2.60.0",)),
        Peer("monarch", "Monarch actor", "monarch_actor", ("torchmonarch==0.7.0",)),
        Peer("hivemind", "hivemind expert", "hivemind_expert", ("hivemind==1.1.12",)),
        Peer("dask", "Dask actor", "dask_actor", ("distributed==2026.8.0",)),
    )
}


def python_of(peer: Peer, folder: Path = FOLDER) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there as it should be.

    `PIP_ARGS` and `TORCH_INDEX_URL` count as they do for `make install`.
    """
    environment = folder / peer.name
    python, note = environment / "bin" / "python", environment / ".installed"
    requirements = [*_same_torch(), *peer.requirements]
    if note.exists() and note.read_text().split() == requirements:
        return python
    _run(sys.executable, "-m", "venv", "--clear", str(environment))
    index = _run(str(ROOT / "scripts" / "torch-index")).strip()
    _run(
        *(str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"),
        *os.environ.get("PIP_ARGS", "").split(),
        *(["--extra-index-url", index] if index else []),
        *requirements,
    )
    note.write_text("\n".join(requirements))
    return python


def _same_torch() -> list[str]:
    """What gradwire is measured with."""
    return re.findall(r"^(?:torch|numpy)==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def _run(*command: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CannotInstall(next((line for line in lines if line.startswith("ERROR:")), "".join(lines[-1:])))
    return done.stdout
