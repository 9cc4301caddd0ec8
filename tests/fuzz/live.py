"""``python -m tests.fuzz.live ADDRESS --messages 1000 --seed 0``: sends mutated messages to a worker.

They go all ways in: as requests of a session that is in order but for their bodies, as unary calls, and as
frames over gRPC, a unix socket and TCP. Prints how many went which way, and what came of them, as JSON.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import grpc
from tests.fuzz.inputs import Input, load_corpus
from tests.fuzz.targets.requests import ATTACHMENT, Requests, is_of_gradwire
from tests.fuzz.targets.serving import CLIENT, WORKER
from tests.fuzz.targets.sessions import Sessions
from tests.integration.test_hostile import RawLink

import gradwire as gw
from gradwire.errors import GradwireError, InternalError, RemoteError
from gradwire.peers.current import default_peer, reset_default_peer
from gradwire.proto.v1 import link_pb2
from gradwire.wire import Attachment

SECONDS = 60.0
"""How long a response may take; without one the worker hangs."""
_PER_SESSION = 1000
"""Requests of one client, at most, before it leaves and another one comes."""
_AT_ONCE = 100
_PER_RAW_LINK = 12
_UNARY = {
    link_pb2.METHOD_FORWARD_WITH_AUTOGRAD: "ForwardWithAutograd",
    link_pb2.METHOD_PROPAGATE_GRADIENTS: "PropagateGradients",
    link_pb2.METHOD_CLEANUP_CONTEXT: "CleanupContext",
    link_pb2.METHOD_DESCRIBE: "Describe",
    link_pb2.METHOD_INSPECT: "Inspect",
}
_ROUND = ("session", "raw", "unary", "session", "session")


Call = tuple[int, bytes, list[bytes]]


class Sender:
    """Sends messages, and counts what came of them."""

    def __init__(self, address: str, seed: int) -> None:
        self.address = address
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self.findings: dict[str, str] = {}
        self._requests = Requests()
        self._request_corpus = load_corpus("requests")
        self._sessions = Sessions()
        self._session_corpus = load_corpus("sessions")

    @property
    def sent(self) -> int:
        return sum(self.counts[f"sent by {way}"] for way in ("session", "unary", "raw"))

    def send(self, messages: int) -> None:
        while self.sent < messages:
            for way in _ROUND:
                most = min(_PER_SESSION, messages // 8 + 1, messages - self.sent)
                if most > 0:
                    getattr(self, way)(most)

    def _mutated(self, requests: Requests | Sessions, corpus: list[Input]) -> Input:
        return requests.mutate(self.random, self.random.choice(corpus), self.random.choice(corpus))

    def _calls(self, most: int, client: int = CLIENT, worker: int = WORKER) -> Iterator[Call]:
        """Methods, bodies and attachments. The ids in the corpus are replaced by those of real peers."""
        while most > 0:
            attachments: list[bytes] = []
            for part in self._mutated(self._requests, self._request_corpus):
                if part[:1] == bytes([ATTACHMENT]):
                    attachments.append(part[1:])
                    continue
                body = part[1:]
                for id, real in ((CLIENT, client), (WORKER, worker)):
                    body = body.replace(id.to_bytes(8, "little"), real.to_bytes(8, "little"))
                yield part[0] & 0x3F if part else 0, body, attachments
                attachments = []
                most -= 1
                if not most:
                    return

    def session(self, most: int) -> None:
        with gw.connect(self.address, lost_after=SECONDS) as handle:
            handle.echo()
            link = handle._link
            waiting: list[Any] = []
            for method, body, attachments in self._calls(most, default_peer().identity.id, link.peer.id):
                sent = [Attachment(memoryview(bytearray(part))) for part in attachments]
                try:
                    waiting.append(link.send_request(method, body, sent))
                except GradwireError as error:
                    self._judge(error)
                self.counts["sent by session"] += 1
                if len(waiting) == _AT_ONCE:
                    self._wait(waiting)
            self._wait(waiting)
        reset_default_peer()

    def _wait(self, waiting: list[Any]) -> None:
        give_up_at = time.monotonic() + SECONDS
        for future in waiting:
            try:
                future.result(max(give_up_at - time.monotonic(), 0.0))
                self.counts["responses"] += 1
            except GradwireError as error:
                self._judge(error)
            except TimeoutError:
                self._found("no response to a request", f"in {SECONDS:g} s")
        waiting.clear()

    def unary(self, most: int) -> None:
        with grpc.insecure_channel(self.address) as channel:
            waiting: list[Any] = []
            for method, body, _ in self._calls(most // 2 + 1):
                call = channel.unary_unary(f"/gradwire.v1.Worker/{_UNARY.get(method, 'ForwardWithAutograd')}")
                waiting.append(call.future(body, timeout=SECONDS))
                self.counts["sent by unary"] += 1
                if len(waiting) == _AT_ONCE:
                    self._wait_unary(waiting)
            self._wait_unary(waiting)

    def _wait_unary(self, waiting: list[Any]) -> None:
        for future in waiting:
            try:
                future.result()
                self.counts["responses"] += 1
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL):
                    self._found(f"a unary call: {error.code().name}", error.details())
                self.counts["errors"] += 1
        waiting.clear()

    def raw(self, most: int) -> None:
        """A link whose frames are mutated: over gRPC, a unix socket, or TCP."""
        for _ in range(most // 100 + 1):
            with RawLink(self.address, kind=self.random.choice(("grpc", "unix", "tcp"))).welcome() as link:
                frames = self._mutated(self._sessions, self._session_corpus)[: min(_PER_RAW_LINK, most)]
                for data in frames:
                    link.send(data)
                self.counts["sent by raw"] += len(frames)
                most -= len(frames)
            if most <= 0:
                return

    def _judge(self, error: GradwireError) -> None:
        self.counts["errors"] += 1
        self.counts[type(error).__name__] += 1
        if isinstance(error, InternalError):
            self._found("an internal error", f"{error}")
        elif isinstance(error, RemoteError) and is_of_gradwire(error.remote_traceback):
            self._found(f"{error.remote_type}: {str(error)[:80]}", error.remote_traceback)

    def _found(self, what: str, details: str | None) -> None:
        self.findings.setdefault(what, details or "")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.live", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faulthandler.enable()
    sender = Sender(options.address, options.seed)
    sender.send(options.messages)
    print(json.dumps({"counts": sender.counts, "findings": sender.findings}), flush=True)
    sys.exit(1 if sender.findings else 0)


if __name__ == "__main__":
    main()
