from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Singleton(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SINGLETON_NONE: _ClassVar[Singleton]
    SINGLETON_ELLIPSIS: _ClassVar[Singleton]
SINGLETON_NONE: Singleton
SINGLETON_ELLIPSIS: Singleton

class PeerId(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class List(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Dict(_message.Message):
    __slots__ = ("entries",)
    class Entry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: Value
        value: Value
        def __init__(self, key: _Optional[_Union[Value, _Mapping]] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Dict.Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[Dict.Entry, _Mapping]]] = ...) -> None: ...

class Complex(_message.Message):
    __slots__ = ("real", "imaginary")
    REAL_FIELD_NUMBER: _ClassVar[int]
    IMAGINARY_FIELD_NUMBER: _ClassVar[int]
    real: float
    imaginary: float
    def __init__(self, real: _Optional[float] = ..., imaginary: _Optional[float] = ...) -> None: ...

class Slice(_message.Message):
    __slots__ = ("start", "stop", "step")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    start: Value
    stop: Value
    step: Value
    def __init__(self, start: _Optional[_Union[Value, _Mapping]] = ..., stop: _Optional[_Union[Value, _Mapping]] = ..., step: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Size(_message.Message):
    __slots__ = ("sizes",)
    SIZES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class NumpyArray(_message.Message):
    __slots__ = ("dtype", "shape", "storage", "scalar")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    SCALAR_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    storage: int
    scalar: bool
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., storage: _Optional[int] = ..., scalar: bool = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("type", "fields")
    class Field(_message.Message):
        __slots__ = ("name", "value")
        NAME_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        name: str
        value: Value
        def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    type: str
    fields: _containers.RepeatedCompositeFieldContainer[Record.Field]
    def __init__(self, type: _Optional[str] = ..., fields: _Optional[_Iterable[_Union[Record.Field, _Mapping]]] = ...) -> None: ...

class EnumMember(_message.Message):
    __slots__ = ("type", "member")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    type: str
    member: str
    def __init__(self, type: _Optional[str] = ..., member: _Optional[str] = ...) -> None: ...

class RemoteRef(_message.Message):
    __slots__ = ("peer", "ref", "address", "class_name", "name", "is_module", "methods", "release_number")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_MODULE_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    peer: PeerId
    ref: int
    address: str
    class_name: str
    name: str
    is_module: bool
    methods: _containers.RepeatedScalarFieldContainer[str]
    release_number: int
    def __init__(self, peer: _Optional[_Union[PeerId, _Mapping]] = ..., ref: _Optional[int] = ..., address: _Optional[str] = ..., class_name: _Optional[str] = ..., name: _Optional[str] = ..., is_module: bool = ..., methods: _Optional[_Iterable[str]] = ..., release_number: _Optional[int] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("singleton", "boolean", "integer", "big_integer", "real", "complex", "text", "binary", "list", "tuple", "set", "frozen_set", "dict", "slice", "dtype", "device", "size", "tensor", "array", "record", "enum_member", "ref")
    SINGLETON_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    BIG_INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    COMPLEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BINARY_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    FROZEN_SET_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ENUM_MEMBER_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    singleton: Singleton
    boolean: bool
    integer: int
    big_integer: bytes
    real: float
    complex: Complex
    text: str
    binary: bytes
    list: List
    tuple: List
    set: List
    frozen_set: List
    dict: Dict
    slice: Slice
    dtype: str
    device: str
    size: Size
    tensor: int
    array: NumpyArray
    record: Record
    enum_member: EnumMember
    ref: RemoteRef
    def __init__(self, singleton: _Optional[_Union[Singleton, str]] = ..., boolean: bool = ..., integer: _Optional[int] = ..., big_integer: _Optional[bytes] = ..., real: _Optional[float] = ..., complex: _Optional[_Union[Complex, _Mapping]] = ..., text: _Optional[str] = ..., binary: _Optional[bytes] = ..., list: _Optional[_Union[List, _Mapping]] = ..., tuple: _Optional[_Union[List, _Mapping]] = ..., set: _Optional[_Union[List, _Mapping]] = ..., frozen_set: _Optional[_Union[List, _Mapping]] = ..., dict: _Optional[_Union[Dict, _Mapping]] = ..., slice: _Optional[_Union[Slice, _Mapping]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., size: _Optional[_Union[Size, _Mapping]] = ..., tensor: _Optional[int] = ..., array: _Optional[_Union[NumpyArray, _Mapping]] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., enum_member: _Optional[_Union[EnumMember, _Mapping]] = ..., ref: _Optional[_Union[RemoteRef, _Mapping]] = ...) -> None: ...
