from gradwire.proto.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METHOD_UNSPECIFIED: _ClassVar[Method]
    METHOD_FORWARD_WITH_AUTOGRAD: _ClassVar[Method]
    METHOD_PROPAGATE_GRADIENTS: _ClassVar[Method]
    METHOD_CLEANUP_CONTEXT: _ClassVar[Method]
    METHOD_DESCRIBE: _ClassVar[Method]
    METHOD_PING: _ClassVar[Method]
    METHOD_INSPECT: _ClassVar[Method]
METHOD_UNSPECIFIED: Method
METHOD_FORWARD_WITH_AUTOGRAD: Method
METHOD_PROPAGATE_GRADIENTS: Method
METHOD_CLEANUP_CONTEXT: Method
METHOD_DESCRIBE: Method
METHOD_PING: Method
METHOD_INSPECT: Method

class Envelope(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("hello", "welcome", "request", "response", "cancel", "acknowledge", "goodbye", "chunk", "segment", "placed", "returned", "freed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    welcome: Welcome
    request: Request
    response: Response
    cancel: Cancel
    acknowledge: Acknowledge
    goodbye: Goodbye
    chunk: Chunk
    segment: Segment
    placed: Placed
    returned: Returned
    freed: Freed
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., response: _Optional[_Union[Response, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., acknowledge: _Optional[_Union[Acknowledge, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., segment: _Optional[_Union[Segment, _Mapping]] = ..., placed: _Optional[_Union[Placed, _Mapping]] = ..., returned: _Optional[_Union[Returned, _Mapping]] = ..., freed: _Optional[_Union[Freed, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "peer", "name", "session", "attempt", "resume", "max_message_bytes", "max_bytes_in_flight", "same_host", "direct", "secret", "codecs")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    peer: int
    name: str
    session: int
    attempt: int
    resume: bool
    max_message_bytes: int
    max_bytes_in_flight: int
    same_host: bool
    direct: bool
    secret: bytes
    codecs: _containers.RepeatedScalarFieldContainer[_tensor_pb2.Codec]
    def __init__(self, protocol: _Optional[int] = ..., peer: _Optional[int] = ..., name: _Optional[str] = ..., session: _Optional[int] = ..., attempt: _Optional[int] = ..., resume: bool = ..., max_message_bytes: _Optional[int] = ..., max_bytes_in_flight: _Optional[int] = ..., same_host: bool = ..., direct: bool = ..., secret: _Optional[bytes] = ..., codecs: _Optional[_Iterable[_Union[_tensor_pb2.Codec, str]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "peer", "name", "resumed", "lease_seconds", "max_message_bytes", "max_bytes_in_flight", "same_host", "direct", "proof", "codecs")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    peer: int
    name: str
    resumed: bool
    lease_seconds: float
    max_message_bytes: int
    max_bytes_in_flight: int
    same_host: SameHost
    direct: Direct
    proof: bytes
    codecs: _containers.RepeatedScalarFieldContainer[_tensor_pb2.Codec]
    def __init__(self, protocol: _Optional[int] = ..., peer: _Optional[int] = ..., name: _Optional[str] = ..., resumed: bool = ..., lease_seconds: _Optional[float] = ..., max_message_bytes: _Optional[int] = ..., max_bytes_in_flight: _Optional[int] = ..., same_host: _Optional[_Union[SameHost, _Mapping]] = ..., direct: _Optional[_Union[Direct, _Mapping]] = ..., proof: _Optional[bytes] = ..., codecs: _Optional[_Iterable[_Union[_tensor_pb2.Codec, str]]] = ...) -> None: ...

class SameHost(_message.Message):
    __slots__ = ("socket", "token", "seen_address")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEEN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    socket: str
    token: bytes
    seen_address: str
    def __init__(self, socket: _Optional[str] = ..., token: _Optional[bytes] = ..., seen_address: _Optional[str] = ...) -> None: ...

class Direct(_message.Message):
    __slots__ = ("port", "token", "seen_address")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEEN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    port: int
    token: bytes
    seen_address: str
    def __init__(self, port: _Optional[int] = ..., token: _Optional[bytes] = ..., seen_address: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("id", "method", "body", "timeout_seconds", "attachments")
    ID_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    method: Method
    body: bytes
    timeout_seconds: float
    attachments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., method: _Optional[_Union[Method, str]] = ..., body: _Optional[bytes] = ..., timeout_seconds: _Optional[float] = ..., attachments: _Optional[_Iterable[int]] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("id", "body", "error", "attachments")
    ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    body: bytes
    error: Error
    attachments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., body: _Optional[bytes] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., attachments: _Optional[_Iterable[int]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("message", "of_response", "data")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OF_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    message: int
    of_response: bool
    data: bytes
    def __init__(self, message: _Optional[int] = ..., of_response: bool = ..., data: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Acknowledge(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("id", "size")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    id: int
    size: int
    def __init__(self, id: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("message", "of_response", "segment", "size")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OF_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    message: int
    of_response: bool
    segment: int
    size: int
    def __init__(self, message: _Optional[int] = ..., of_response: bool = ..., segment: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Returned(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segments: _Optional[_Iterable[int]] = ...) -> None: ...

class Freed(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segments: _Optional[_Iterable[int]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("error", "leaving")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    error: Error
    leaving: bool
    def __init__(self, error: _Optional[_Union[Error, _Mapping]] = ..., leaving: bool = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "types", "traceback", "worker", "details", "retry_after_seconds", "not_started", "notes", "retryable")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Error.Code]
        CODE_RAISED: _ClassVar[Error.Code]
        CODE_UNKNOWN_FUNCTION: _ClassVar[Error.Code]
        CODE_WRONG_ARGUMENTS: _ClassVar[Error.Code]
        CODE_MALFORMED: _ClassVar[Error.Code]
        CODE_UNENCODABLE: _ClassVar[Error.Code]
        CODE_CANCELLED: _ClassVar[Error.Code]
        CODE_DEADLINE_EXCEEDED: _ClassVar[Error.Code]
        CODE_RESOURCE_EXHAUSTED: _ClassVar[Error.Code]
        CODE_UNAVAILABLE: _ClassVar[Error.Code]
        CODE_WORKER_LOST: _ClassVar[Error.Code]
        CODE_NOT_FOUND: _ClassVar[Error.Code]
        CODE_PERMISSION_DENIED: _ClassVar[Error.Code]
        CODE_INTERNAL: _ClassVar[Error.Code]
        CODE_PROTOCOL: _ClassVar[Error.Code]
        CODE_INVALID_DEVICE_MAP: _ClassVar[Error.Code]
        CODE_STALE_PARAMETERS: _ClassVar[Error.Code]
        CODE_ALREADY_EXISTS: _ClassVar[Error.Code]
        CODE_STEP_REFUSED: _ClassVar[Error.Code]
        CODE_STEP_TORN: _ClassVar[Error.Code]
        CODE_CONNECT_FAILED: _ClassVar[Error.Code]
        CODE_LINK_CLOSED: _ClassVar[Error.Code]
        CODE_TYPE_MISMATCH: _ClassVar[Error.Code]
        CODE_CODEC_UNAVAILABLE: _ClassVar[Error.Code]
    CODE_UNSPECIFIED: Error.Code
    CODE_RAISED: Error.Code
    CODE_UNKNOWN_FUNCTION: Error.Code
    CODE_WRONG_ARGUMENTS: Error.Code
    CODE_MALFORMED: Error.Code
    CODE_UNENCODABLE: Error.Code
    CODE_CANCELLED: Error.Code
    CODE_DEADLINE_EXCEEDED: Error.Code
    CODE_RESOURCE_EXHAUSTED: Error.Code
    CODE_UNAVAILABLE: Error.Code
    CODE_WORKER_LOST: Error.Code
    CODE_NOT_FOUND: Error.Code
    CODE_PERMISSION_DENIED: Error.Code
    CODE_INTERNAL: Error.Code
    CODE_PROTOCOL: Error.Code
    CODE_INVALID_DEVICE_MAP: Error.Code
    CODE_STALE_PARAMETERS: Error.Code
    CODE_ALREADY_EXISTS: Error.Code
    CODE_STEP_REFUSED: Error.Code
    CODE_STEP_TORN: Error.Code
    CODE_CONNECT_FAILED: Error.Code
    CODE_LINK_CLOSED: Error.Code
    CODE_TYPE_MISMATCH: Error.Code
    CODE_CODEC_UNAVAILABLE: Error.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NOT_STARTED_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: Error.Code
    message: str
    types: _containers.RepeatedScalarFieldContainer[str]
    traceback: str
    worker: str
    details: _containers.RepeatedScalarFieldContainer[str]
    retry_after_seconds: float
    not_started: bool
    notes: _containers.RepeatedScalarFieldContainer[str]
    retryable: bool
    def __init__(self, code: _Optional[_Union[Error.Code, str]] = ..., message: _Optional[str] = ..., types: _Optional[_Iterable[str]] = ..., traceback: _Optional[str] = ..., worker: _Optional[str] = ..., details: _Optional[_Iterable[str]] = ..., retry_after_seconds: _Optional[float] = ..., not_started: bool = ..., notes: _Optional[_Iterable[str]] = ..., retryable: bool = ...) -> None: ...
