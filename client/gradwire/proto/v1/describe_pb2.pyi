from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("name", "peer", "version", "torch_version", "functions", "types", "devices")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    name: str
    peer: int
    version: str
    torch_version: str
    functions: _containers.RepeatedCompositeFieldContainer[Function]
    types: _containers.RepeatedCompositeFieldContainer[ExposedType]
    devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., peer: _Optional[int] = ..., version: _Optional[str] = ..., torch_version: _Optional[str] = ..., functions: _Optional[_Iterable[_Union[Function, _Mapping]]] = ..., types: _Optional[_Iterable[_Union[ExposedType, _Mapping]]] = ..., devices: _Optional[_Iterable[str]] = ...) -> None: ...

class Function(_message.Message):
    __slots__ = ("name", "kind", "doc", "parameters", "returns", "methods")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Function.Kind]
        KIND_FUNCTION: _ClassVar[Function.Kind]
        KIND_CLASS: _ClassVar[Function.Kind]
        KIND_INSTANCE: _ClassVar[Function.Kind]
    KIND_UNSPECIFIED: Function.Kind
    KIND_FUNCTION: Function.Kind
    KIND_CLASS: Function.Kind
    KIND_INSTANCE: Function.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DOC_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: Function.Kind
    doc: str
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    returns: str
    methods: _containers.RepeatedCompositeFieldContainer[Function]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[Function.Kind, str]] = ..., doc: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., returns: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[Function, _Mapping]]] = ...) -> None: ...

class Parameter(_message.Message):
    __slots__ = ("name", "kind", "annotation", "default")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Parameter.Kind]
        KIND_POSITIONAL_ONLY: _ClassVar[Parameter.Kind]
        KIND_POSITIONAL_OR_KEYWORD: _ClassVar[Parameter.Kind]
        KIND_VAR_POSITIONAL: _ClassVar[Parameter.Kind]
        KIND_KEYWORD_ONLY: _ClassVar[Parameter.Kind]
        KIND_VAR_KEYWORD: _ClassVar[Parameter.Kind]
    KIND_UNSPECIFIED: Parameter.Kind
    KIND_POSITIONAL_ONLY: Parameter.Kind
    KIND_POSITIONAL_OR_KEYWORD: Parameter.Kind
    KIND_VAR_POSITIONAL: Parameter.Kind
    KIND_KEYWORD_ONLY: Parameter.Kind
    KIND_VAR_KEYWORD: Parameter.Kind
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ANNOTATION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: Parameter.Kind
    annotation: str
    default: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[Parameter.Kind, str]] = ..., annotation: _Optional[str] = ..., default: _Optional[str] = ...) -> None: ...

class ExposedType(_message.Message):
    __slots__ = ("name", "members", "is_enum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    IS_ENUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    members: _containers.RepeatedScalarFieldContainer[str]
    is_enum: bool
    def __init__(self, name: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ..., is_enum: bool = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("name", "uptime_seconds", "contexts", "clients", "calls", "resident_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXTS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    uptime_seconds: float
    contexts: _containers.RepeatedCompositeFieldContainer[HeldContext]
    clients: _containers.RepeatedCompositeFieldContainer[HeldClient]
    calls: int
    resident_bytes: int
    def __init__(self, name: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., contexts: _Optional[_Iterable[_Union[HeldContext, _Mapping]]] = ..., clients: _Optional[_Iterable[_Union[HeldClient, _Mapping]]] = ..., calls: _Optional[int] = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class HeldContext(_message.Message):
    __slots__ = ("id", "owner", "age_seconds", "results", "arguments", "gradients", "bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    owner: str
    age_seconds: float
    results: int
    arguments: int
    gradients: int
    bytes: int
    def __init__(self, id: _Optional[str] = ..., owner: _Optional[str] = ..., age_seconds: _Optional[float] = ..., results: _Optional[int] = ..., arguments: _Optional[int] = ..., gradients: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class HeldClient(_message.Message):
    __slots__ = ("name", "peer", "connected", "sent_bytes", "received_bytes", "saved_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    peer: str
    connected: bool
    sent_bytes: int
    received_bytes: int
    saved_bytes: int
    def __init__(self, name: _Optional[str] = ..., peer: _Optional[str] = ..., connected: bool = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., saved_bytes: _Optional[int] = ...) -> None: ...
