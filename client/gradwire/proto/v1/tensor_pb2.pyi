from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]
    DTYPE_INT8: _ClassVar[DType]
    DTYPE_INT16: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_UINT16: _ClassVar[DType]
    DTYPE_UINT32: _ClassVar[DType]
    DTYPE_UINT64: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_COMPLEX32: _ClassVar[DType]
    DTYPE_COMPLEX64: _ClassVar[DType]
    DTYPE_COMPLEX128: _ClassVar[DType]
    DTYPE_FLOAT8_E4M3FN: _ClassVar[DType]
    DTYPE_FLOAT8_E4M3FNUZ: _ClassVar[DType]
    DTYPE_FLOAT8_E5M2: _ClassVar[DType]
    DTYPE_FLOAT8_E5M2FNUZ: _ClassVar[DType]
    DTYPE_FLOAT8_E8M0FNU: _ClassVar[DType]
    DTYPE_FLOAT4_E2M1FN_X2: _ClassVar[DType]
    DTYPE_BITS8: _ClassVar[DType]
    DTYPE_BITS16: _ClassVar[DType]
    DTYPE_BITS1X8: _ClassVar[DType]
    DTYPE_BITS2X4: _ClassVar[DType]
    DTYPE_BITS4X2: _ClassVar[DType]
    DTYPE_INT1: _ClassVar[DType]
    DTYPE_INT2: _ClassVar[DType]
    DTYPE_INT3: _ClassVar[DType]
    DTYPE_INT4: _ClassVar[DType]
    DTYPE_INT5: _ClassVar[DType]
    DTYPE_INT6: _ClassVar[DType]
    DTYPE_INT7: _ClassVar[DType]
    DTYPE_UINT1: _ClassVar[DType]
    DTYPE_UINT2: _ClassVar[DType]
    DTYPE_UINT3: _ClassVar[DType]
    DTYPE_UINT4: _ClassVar[DType]
    DTYPE_UINT5: _ClassVar[DType]
    DTYPE_UINT6: _ClassVar[DType]
    DTYPE_UINT7: _ClassVar[DType]
    DTYPE_QINT8: _ClassVar[DType]
    DTYPE_QUINT8: _ClassVar[DType]
    DTYPE_QINT32: _ClassVar[DType]

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYOUT_UNSPECIFIED: _ClassVar[Layout]
    LAYOUT_STRIDED: _ClassVar[Layout]
    LAYOUT_SPARSE_COO: _ClassVar[Layout]
    LAYOUT_SPARSE_CSR: _ClassVar[Layout]
    LAYOUT_SPARSE_CSC: _ClassVar[Layout]
    LAYOUT_SPARSE_BSR: _ClassVar[Layout]
    LAYOUT_SPARSE_BSC: _ClassVar[Layout]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_NONE: _ClassVar[Codec]
    CODEC_FP16: _ClassVar[Codec]
    CODEC_BF16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_ZSTD: _ClassVar[Codec]
DTYPE_UNSPECIFIED: DType
DTYPE_BOOL: DType
DTYPE_INT8: DType
DTYPE_INT16: DType
DTYPE_INT32: DType
DTYPE_INT64: DType
DTYPE_UINT8: DType
DTYPE_UINT16: DType
DTYPE_UINT32: DType
DTYPE_UINT64: DType
DTYPE_FLOAT16: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
DTYPE_BFLOAT16: DType
DTYPE_COMPLEX32: DType
DTYPE_COMPLEX64: DType
DTYPE_COMPLEX128: DType
DTYPE_FLOAT8_E4M3FN: DType
DTYPE_FLOAT8_E4M3FNUZ: DType
DTYPE_FLOAT8_E5M2: DType
DTYPE_FLOAT8_E5M2FNUZ: DType
DTYPE_FLOAT8_E8M0FNU: DType
DTYPE_FLOAT4_E2M1FN_X2: DType
DTYPE_BITS8: DType
DTYPE_BITS16: DType
DTYPE_BITS1X8: DType
DTYPE_BITS2X4: DType
DTYPE_BITS4X2: DType
DTYPE_INT1: DType
DTYPE_INT2: DType
DTYPE_INT3: DType
DTYPE_INT4: DType
DTYPE_INT5: DType
DTYPE_INT6: DType
DTYPE_INT7: DType
DTYPE_UINT1: DType
DTYPE_UINT2: DType
DTYPE_UINT3: DType
DTYPE_UINT4: DType
DTYPE_UINT5: DType
DTYPE_UINT6: DType
DTYPE_UINT7: DType
DTYPE_QINT8: DType
DTYPE_QUINT8: DType
DTYPE_QINT32: DType
LAYOUT_UNSPECIFIED: Layout
LAYOUT_STRIDED: Layout
LAYOUT_SPARSE_COO: Layout
LAYOUT_SPARSE_CSR: Layout
LAYOUT_SPARSE_CSC: Layout
LAYOUT_SPARSE_BSR: Layout
LAYOUT_SPARSE_BSC: Layout
CODEC_NONE: Codec
CODEC_FP16: Codec
CODEC_BF16: Codec
CODEC_INT8: Codec
CODEC_ZSTD: Codec

class Encoded(_message.Message):
    __slots__ = ("inline", "attachment", "narrowed", "blockwise", "zstandard")
    class Narrowed(_message.Message):
        __slots__ = ("dtype", "narrow")
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        NARROW_FIELD_NUMBER: _ClassVar[int]
        dtype: DType
        narrow: DType
        def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., narrow: _Optional[_Union[DType, str]] = ...) -> None: ...
    class Blockwise(_message.Message):
        __slots__ = ("dtype", "block")
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        BLOCK_FIELD_NUMBER: _ClassVar[int]
        dtype: DType
        block: int
        def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., block: _Optional[int] = ...) -> None: ...
    class Zstandard(_message.Message):
        __slots__ = ("width",)
        WIDTH_FIELD_NUMBER: _ClassVar[int]
        width: int
        def __init__(self, width: _Optional[int] = ...) -> None: ...
    INLINE_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    NARROWED_FIELD_NUMBER: _ClassVar[int]
    BLOCKWISE_FIELD_NUMBER: _ClassVar[int]
    ZSTANDARD_FIELD_NUMBER: _ClassVar[int]
    inline: bytes
    attachment: int
    narrowed: Encoded.Narrowed
    blockwise: Encoded.Blockwise
    zstandard: Encoded.Zstandard
    def __init__(self, inline: _Optional[bytes] = ..., attachment: _Optional[int] = ..., narrowed: _Optional[_Union[Encoded.Narrowed, _Mapping]] = ..., blockwise: _Optional[_Union[Encoded.Blockwise, _Mapping]] = ..., zstandard: _Optional[_Union[Encoded.Zstandard, _Mapping]] = ...) -> None: ...

class Storage(_message.Message):
    __slots__ = ("size", "inline", "attachment", "encoded")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    size: int
    inline: bytes
    attachment: int
    encoded: Encoded
    def __init__(self, size: _Optional[int] = ..., inline: _Optional[bytes] = ..., attachment: _Optional[int] = ..., encoded: _Optional[_Union[Encoded, _Mapping]] = ...) -> None: ...

class Quantization(_message.Message):
    __slots__ = ("scales", "zero_points", "axis")
    SCALES_FIELD_NUMBER: _ClassVar[int]
    ZERO_POINTS_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    scales: _containers.RepeatedScalarFieldContainer[float]
    zero_points: _containers.RepeatedScalarFieldContainer[int]
    axis: int
    def __init__(self, scales: _Optional[_Iterable[float]] = ..., zero_points: _Optional[_Iterable[int]] = ..., axis: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "layout", "device", "requires_grad", "storage", "offset", "strides", "components", "coalesced", "quantization")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STRIDES_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    COALESCED_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    layout: Layout
    device: str
    requires_grad: bool
    storage: int
    offset: int
    strides: _containers.RepeatedScalarFieldContainer[int]
    components: _containers.RepeatedScalarFieldContainer[int]
    coalesced: bool
    quantization: Quantization
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., layout: _Optional[_Union[Layout, str]] = ..., device: _Optional[str] = ..., requires_grad: bool = ..., storage: _Optional[int] = ..., offset: _Optional[int] = ..., strides: _Optional[_Iterable[int]] = ..., components: _Optional[_Iterable[int]] = ..., coalesced: bool = ..., quantization: _Optional[_Union[Quantization, _Mapping]] = ...) -> None: ...

class TensorTable(_message.Message):
    __slots__ = ("tensors", "storages")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    STORAGES_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    storages: _containers.RepeatedCompositeFieldContainer[Storage]
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., storages: _Optional[_Iterable[_Union[Storage, _Mapping]]] = ...) -> None: ...
