from gradwire.proto.v1 import tensor_pb2 as _tensor_pb2
from gradwire.proto.v1 import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ContextId(_message.Message):
    __slots__ = ("peer", "number", "key")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    peer: int
    number: int
    key: int
    def __init__(self, peer: _Optional[int] = ..., number: _Optional[int] = ..., key: _Optional[int] = ...) -> None: ...

class AutogradMessageId(_message.Message):
    __slots__ = ("peer", "number", "key")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    peer: int
    number: int
    key: int
    def __init__(self, peer: _Optional[int] = ..., number: _Optional[int] = ..., key: _Optional[int] = ...) -> None: ...

class AutogradMetadata(_message.Message):
    __slots__ = ("context", "message", "depends_on", "oldest_pass", "builds_on", "segment_handle")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DEPENDS_ON_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PASS_FIELD_NUMBER: _ClassVar[int]
    BUILDS_ON_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    context: ContextId
    message: AutogradMessageId
    depends_on: _containers.RepeatedCompositeFieldContainer[AutogradMessageId]
    oldest_pass: int
    builds_on: _containers.RepeatedCompositeFieldContainer[AutogradMessageId]
    segment_handle: AutogradMessageId
    def __init__(self, context: _Optional[_Union[ContextId, _Mapping]] = ..., message: _Optional[_Union[AutogradMessageId, _Mapping]] = ..., depends_on: _Optional[_Iterable[_Union[AutogradMessageId, _Mapping]]] = ..., oldest_pass: _Optional[int] = ..., builds_on: _Optional[_Iterable[_Union[AutogradMessageId, _Mapping]]] = ..., segment_handle: _Optional[_Union[AutogradMessageId, _Mapping]] = ...) -> None: ...

class Autocast(_message.Message):
    __slots__ = ("device_type", "enabled", "dtype")
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    device_type: str
    enabled: bool
    dtype: str
    def __init__(self, device_type: _Optional[str] = ..., enabled: bool = ..., dtype: _Optional[str] = ...) -> None: ...

class Modes(_message.Message):
    __slots__ = ("no_grad", "inference", "autocast", "detect_anomaly")
    NO_GRAD_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_FIELD_NUMBER: _ClassVar[int]
    AUTOCAST_FIELD_NUMBER: _ClassVar[int]
    DETECT_ANOMALY_FIELD_NUMBER: _ClassVar[int]
    no_grad: bool
    inference: bool
    autocast: _containers.RepeatedCompositeFieldContainer[Autocast]
    detect_anomaly: bool
    def __init__(self, no_grad: bool = ..., inference: bool = ..., autocast: _Optional[_Iterable[_Union[Autocast, _Mapping]]] = ..., detect_anomaly: bool = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("name", "allow_stale")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ALLOW_STALE_FIELD_NUMBER: _ClassVar[int]
    name: str
    allow_stale: bool
    def __init__(self, name: _Optional[str] = ..., allow_stale: bool = ...) -> None: ...

class Compression(_message.Message):
    __slots__ = ("forward", "backward", "error_feedback", "site")
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    forward: _tensor_pb2.Codec
    backward: _tensor_pb2.Codec
    error_feedback: bool
    site: int
    def __init__(self, forward: _Optional[_Union[_tensor_pb2.Codec, str]] = ..., backward: _Optional[_Union[_tensor_pb2.Codec, str]] = ..., error_feedback: bool = ..., site: _Optional[int] = ...) -> None: ...

class ForwardWithAutogradRequest(_message.Message):
    __slots__ = ("function", "args", "kwargs", "tensors", "autograd", "modes", "target", "released", "devices", "keep", "compression", "plan", "kwarg_names")
    class KwargsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _value_pb2.Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ...) -> None: ...
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    AUTOGRAD_FIELD_NUMBER: _ClassVar[int]
    MODES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    KWARG_NAMES_FIELD_NUMBER: _ClassVar[int]
    function: str
    args: _containers.RepeatedCompositeFieldContainer[_value_pb2.Value]
    kwargs: _containers.MessageMap[str, _value_pb2.Value]
    tensors: _tensor_pb2.TensorTable
    autograd: AutogradMetadata
    modes: Modes
    target: _value_pb2.RemoteRef
    released: _containers.RepeatedCompositeFieldContainer[AutogradMessageId]
    devices: _containers.RepeatedScalarFieldContainer[str]
    keep: Keep
    compression: Compression
    plan: int
    kwarg_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, function: _Optional[str] = ..., args: _Optional[_Iterable[_Union[_value_pb2.Value, _Mapping]]] = ..., kwargs: _Optional[_Mapping[str, _value_pb2.Value]] = ..., tensors: _Optional[_Union[_tensor_pb2.TensorTable, _Mapping]] = ..., autograd: _Optional[_Union[AutogradMetadata, _Mapping]] = ..., modes: _Optional[_Union[Modes, _Mapping]] = ..., target: _Optional[_Union[_value_pb2.RemoteRef, _Mapping]] = ..., released: _Optional[_Iterable[_Union[AutogradMessageId, _Mapping]]] = ..., devices: _Optional[_Iterable[str]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., compression: _Optional[_Union[Compression, _Mapping]] = ..., plan: _Optional[int] = ..., kwarg_names: _Optional[_Iterable[str]] = ...) -> None: ...

class ForwardWithAutogradResponse(_message.Message):
    __slots__ = ("result", "tensors", "autograd", "released", "plan_is_kept", "result_number")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    AUTOGRAD_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    PLAN_IS_KEPT_FIELD_NUMBER: _ClassVar[int]
    RESULT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    result: _value_pb2.Value
    tensors: _tensor_pb2.TensorTable
    autograd: AutogradMetadata
    released: _containers.RepeatedCompositeFieldContainer[AutogradMessageId]
    plan_is_kept: bool
    result_number: int
    def __init__(self, result: _Optional[_Union[_value_pb2.Value, _Mapping]] = ..., tensors: _Optional[_Union[_tensor_pb2.TensorTable, _Mapping]] = ..., autograd: _Optional[_Union[AutogradMetadata, _Mapping]] = ..., released: _Optional[_Iterable[_Union[AutogradMessageId, _Mapping]]] = ..., plan_is_kept: bool = ..., result_number: _Optional[int] = ...) -> None: ...

class Gradients(_message.Message):
    __slots__ = ("message", "slots", "tensors")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    message: AutogradMessageId
    slots: _containers.RepeatedScalarFieldContainer[int]
    tensors: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, message: _Optional[_Union[AutogradMessageId, _Mapping]] = ..., slots: _Optional[_Iterable[int]] = ..., tensors: _Optional[_Iterable[int]] = ...) -> None: ...

class PropagateGradientsRequest(_message.Message):
    __slots__ = ("context", "gradients", "tensors", "retain_graph", "create_graph", "collect_into", "skip_leaves", "autograd", "released", "detect_anomaly", "more_gradients", "suspended_backward", "gradients_to_come", "compression", "pass_ended")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PASS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    RETAIN_GRAPH_FIELD_NUMBER: _ClassVar[int]
    CREATE_GRAPH_FIELD_NUMBER: _ClassVar[int]
    COLLECT_INTO_FIELD_NUMBER: _ClassVar[int]
    SKIP_LEAVES_FIELD_NUMBER: _ClassVar[int]
    AUTOGRAD_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    DETECT_ANOMALY_FIELD_NUMBER: _ClassVar[int]
    MORE_GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_TO_COME_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    PASS_ENDED_FIELD_NUMBER: _ClassVar[int]
    context: ContextId
    gradients: Gradients
    tensors: _tensor_pb2.TensorTable
    retain_graph: bool
    create_graph: bool
    collect_into: ContextId
    skip_leaves: bool
    autograd: AutogradMetadata
    released: _containers.RepeatedCompositeFieldContainer[AutogradMessageId]
    detect_anomaly: bool
    more_gradients: _containers.RepeatedCompositeFieldContainer[Gradients]
    suspended_backward: AutogradMessageId
    gradients_to_come: _containers.RepeatedCompositeFieldContainer[AutogradMessageId]
    compression: Compression
    pass_ended: bool
    def __init__(self, context: _Optional[_Union[ContextId, _Mapping]] = ..., gradients: _Optional[_Union[Gradients, _Mapping]] = ..., tensors: _Optional[_Union[_tensor_pb2.TensorTable, _Mapping]] = ..., retain_graph: bool = ..., create_graph: bool = ..., collect_into: _Optional[_Union[ContextId, _Mapping]] = ..., skip_leaves: bool = ..., autograd: _Optional[_Union[AutogradMetadata, _Mapping]] = ..., released: _Optional[_Iterable[_Union[AutogradMessageId, _Mapping]]] = ..., detect_anomaly: bool = ..., more_gradients: _Optional[_Iterable[_Union[Gradients, _Mapping]]] = ..., suspended_backward: _Optional[_Union[AutogradMessageId, _Mapping]] = ..., gradients_to_come: _Optional[_Iterable[_Union[AutogradMessageId, _Mapping]]] = ..., compression: _Optional[_Union[Compression, _Mapping]] = ..., pass_ended: bool = ..., **kwargs) -> None: ...

class PropagateGradientsResponse(_message.Message):
    __slots__ = ("contributions", "tensors", "autograd", "released", "is_suspended", "awaits_end")
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    AUTOGRAD_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    IS_SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    AWAITS_END_FIELD_NUMBER: _ClassVar[int]
    contributions: _containers.RepeatedCompositeFieldContainer[Gradients]
    tensors: _tensor_pb2.TensorTable
    autograd: AutogradMetadata
    released: _containers.RepeatedCompositeFieldContainer[AutogradMessageId]
    is_suspended: bool
    awaits_end: bool
    def __init__(self, contributions: _Optional[_Iterable[_Union[Gradients, _Mapping]]] = ..., tensors: _Optional[_Union[_tensor_pb2.TensorTable, _Mapping]] = ..., autograd: _Optional[_Union[AutogradMetadata, _Mapping]] = ..., released: _Optional[_Iterable[_Union[AutogradMessageId, _Mapping]]] = ..., is_suspended: bool = ..., awaits_end: bool = ...) -> None: ...

class CleanupContextRequest(_message.Message):
    __slots__ = ("context", "messages", "owner_is_gone")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OWNER_IS_GONE_FIELD_NUMBER: _ClassVar[int]
    context: ContextId
    messages: _containers.RepeatedCompositeFieldContainer[AutogradMessageId]
    owner_is_gone: bool
    def __init__(self, context: _Optional[_Union[ContextId, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[AutogradMessageId, _Mapping]]] = ..., owner_is_gone: bool = ...) -> None: ...

class CleanupContextResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...
