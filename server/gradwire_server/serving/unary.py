"""The unary methods: the same requests as over a Link, for any client with a generated stub."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc

from gradwire.errors import GradwireError, ResourceExhausted
from gradwire.proto.v1 import link_pb2
from gradwire.transport import Handler, Payload, Sendable, ServerCall, faults

__all__ = ["ERROR_METADATA", "UnaryCall", "unary_handler"]

log = logging.getLogger("gradwire.server")

ERROR_METADATA = "gradwire-error-bin"
"""Trailing metadata with the complete gradwire.v1.Error, for clients that need more than status and text."""

Code = link_pb2.Error

_STATUS: dict[int, grpc.StatusCode] = {
    Code.CODE_RAISED: grpc.StatusCode.UNKNOWN,
    Code.CODE_UNKNOWN_FUNCTION: grpc.StatusCode.NOT_FOUND,
    Code.CODE_WRONG_ARGUMENTS: grpc.StatusCode.INVALID_ARGUMENT,
    Code.CODE_TYPE_MISMATCH: grpc.StatusCode.INVALID_ARGUMENT,
    Code.CODE_MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Code.CODE_UNENCODABLE: grpc.StatusCode.FAILED_PRECONDITION,
    Code.CODE_CANCELLED: grpc.StatusCode.CANCELLED,
    Code.CODE_DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Code.CODE_RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.CODE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.CODE_WORKER_LOST: grpc.StatusCode.ABORTED,
    Code.CODE_CONNECT_FAILED: grpc.StatusCode.ABORTED,
    Code.CODE_LINK_CLOSED: grpc.StatusCode.ABORTED,
    Code.CODE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.CODE_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    Code.CODE_INTERNAL: grpc.StatusCode.INTERNAL,
    Code.CODE_PROTOCOL: grpc.StatusCode.FAILED_PRECONDITION,
    Code.CODE_STALE_PARAMETERS: grpc.StatusCode.FAILED_PRECONDITION,
    Code.CODE_ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Code.CODE_STEP_TORN: grpc.StatusCode.DATA_LOSS,
    Code.CODE_STEP_REFUSED: grpc.StatusCode.FAILED_PRECONDITION,
    Code.CODE_INVALID_DEVICE_MAP: grpc.StatusCode.INVALID_ARGUMENT,
    Code.CODE_CODEC_UNAVAILABLE: grpc.StatusCode.FAILED_PRECONDITION,
}


class UnaryCall(ServerCall):
    """A request that came as a unary call. The worker cannot send requests back to its client."""

    link = None

    def __init__(self, method: int, body: bytes, context: grpc.ServicerContext) -> None:
        super().__init__()
        self.method = method
        self.request = Payload(body)
        left = context.time_remaining()
        # gRPC reports "no deadline" as a time centuries away.
        self.deadline = time.monotonic() + left if left is not None and left < 1e9 else None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._outcome: bytes | link_pb2.Error | None = None
        if not context.add_callback(self._on_rpc_end):
            self._on_rpc_end()

    def respond(self, body: bytes, attachments: Sequence[Sendable] = ()) -> bool:
        if attachments:
            raise AssertionError("a unary response carries its tensors inline")
        return self._settle(body)

    def fail(self, error: link_pb2.Error) -> None:
        self._settle(error)

    def _settle(self, outcome: bytes | link_pb2.Error) -> bool:
        with self._lock:
            is_first = self._outcome is None
            if is_first:
                self._outcome = outcome
        self._done.set()
        return is_first

    def wait(self) -> bytes | link_pb2.Error | None:
        """The outcome; None if the client went away first."""
        # Ends with an outcome or with the RPC, whose end gRPC reports.
        self._done.wait()
        return self._outcome

    def _on_rpc_end(self) -> None:
        with self._lock:
            if self._outcome is not None:
                return
        self._done.set()
        self.cancel()


def unary_handler(method: int, handle: Handler, name: str, max_bytes: int) -> Any:
    """A gRPC method that calls `handle`. It gets bodies as bytes: they are parsed
    where errors become responses."""

    def too_large(what: str, size: int) -> link_pb2.Error:
        error: GradwireError = ResourceExhausted(
            f"a {what} of {size} bytes exceeds the limit of {max_bytes} bytes for a unary call; "
            "use the Link method, which carries tensors of any size in chunks",
            worker=name,
        )
        return faults.describe(error, name)

    def serve(body: bytes, context: grpc.ServicerContext) -> bytes:
        outcome: bytes | link_pb2.Error | None
        if len(body) > max_bytes:
            outcome = too_large("request", len(body))
        else:
            server_call = UnaryCall(method, body, context)
            try:
                handle(server_call)
            except Exception as error:
                if not isinstance(error, GradwireError):
                    log.exception("the handler of a unary call failed")
                server_call.fail(faults.describe(error, name))
            outcome = server_call.wait()
            if isinstance(outcome, bytes) and len(outcome) > max_bytes:
                outcome = too_large("response", len(outcome))
        if outcome is None:
            return b""  # the client is gone
        if isinstance(outcome, bytes):
            return outcome
        _shorten(outcome)
        described = (ERROR_METADATA, outcome.SerializeToString())
        context.set_trailing_metadata((described, *_retry_hint(outcome, name)))
        text = f"{outcome.types[0]}: {outcome.message}" if outcome.types else outcome.message
        context.abort(_STATUS.get(outcome.code, grpc.StatusCode.INTERNAL), text)
        raise AssertionError("abort raises")

    return grpc.unary_unary_rpc_method_handler(serve)


def _retry_hint(error: link_pb2.Error, name: str) -> tuple[tuple[str, str], ...]:
    """A hint for gRPC's own retries, if a client has configured them."""
    if error.worker != name:
        # An error of another worker: the function that called it has run here,
        # and must not run again unasked.
        return (("grpc-retry-pushback-ms", "-1"),)
    if not error.retry_after_seconds:
        return ()
    return (("grpc-retry-pushback-ms", str(math.ceil(1000 * error.retry_after_seconds))),)


def _shorten(error: link_pb2.Error) -> None:
    """gRPC fails with an error about metadata if they exceed 8 KB."""
    error.message = _cut(error.message, 1000)
    error.traceback = _cut(error.traceback, 2000)
    del error.types[8:], error.details[8:], error.notes[4:]
    error.notes[:] = [_cut(note, 250) for note in error.notes]


def _cut(text: str, length: int) -> str:
    """Shortens a text to its beginning and its end, which says most in a traceback."""
    if len(text.encode()) <= length:
        return text
    start = text.encode()[: length // 4].decode(errors="ignore")
    end = text.encode()[-length * 3 // 4 :].decode(errors="ignore")
    return f"{start}\n...\n{end}"
