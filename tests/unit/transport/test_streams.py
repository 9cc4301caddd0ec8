"""What a gRPC stream writes, and when."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from gradwire.transport import GrpcStream

SECONDS = 20.0


class Idle:
    """A session with nothing to write."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()

    def take_output(self, stream: GrpcStream) -> bytes:
        self.was_asked.set()
        return b""


def test_what_is_put_while_it_waits_for_the_session_is_written_at_once() -> None:
    session = Idle()
    stream = GrpcStream(session)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(next, stream)
        assert session.was_asked.wait(SECONDS)
        stream.put(b"the session goes over this stream")
        stream.wake()
        try:
            assert written.result(SECONDS) == b"the session goes over this stream"
        finally:
            stream.close()
