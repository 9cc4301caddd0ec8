"""Who a peer is, and how it proves that.

A peer draws a secret when it starts, and its id is a hash of the secret. It says the secret to the workers
that it connects to: nobody who merely knows the id of a peer can introduce himself as that peer. A worker
gives each of its clients a proof, for each another one, but always the same: no second worker can pass as one
that the client is connected to.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from dataclasses import dataclass, field
from typing import Self

from gradwire.errors import PermissionDenied

__all__ = ["KnownWorkers", "OwnIdentity", "PeerIdentity", "is_secret_of"]


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Identifies a peer."""

    id: int
    """A random 64-bit id, drawn anew each time a process starts."""
    name: str
    """A name for people to read."""
    address: str = ""
    """The address at which this process reached the peer; empty if the peer does not listen."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.address else self.name


@dataclass(frozen=True, slots=True)
class OwnIdentity(PeerIdentity):
    """The identity of a peer of this process, with what proves it."""

    secret: bytes = field(kw_only=True, repr=False)
    """Said to the workers that this peer connects to."""
    proof_key: bytes = field(kw_only=True, repr=False)
    """Never said."""

    @classmethod
    def new(cls, name: str) -> Self:
        secret = secrets.token_bytes(32)
        return cls(_id_of(secret), name, secret=secret, proof_key=secrets.token_bytes(32))

    def proof_for(self, secret: bytes) -> bytes:
        """What proves to the client with this secret that a worker is the same as before."""
        return hmac.digest(self.proof_key, secret, "sha256")


def _id_of(secret: bytes) -> int:
    return int.from_bytes(hashlib.sha256(secret).digest()[:8], "little")


def is_secret_of(peer: int, secret: bytes) -> bool:
    """Whether a secret proves that somebody is the peer with this id."""
    return _id_of(secret) == peer


class KnownWorkers:
    """The workers that a peer is connected to, and the proof that each has given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._proofs: dict[int, bytes] = {}

    def check(self, worker: PeerIdentity, proof: bytes) -> None:
        """Raises PermissionDenied if another worker than this one has introduced itself with this id."""
        with self._lock:
            known = self._proofs.setdefault(worker.id, proof)
        if not hmac.compare_digest(known, proof):
            raise PermissionDenied(
                f"{worker} claims to be another worker, which this process is connected to: do not trust it",
                worker=str(worker),
            )

    def forget(self, worker: int) -> None:
        with self._lock:
            self._proofs.pop(worker, None)
