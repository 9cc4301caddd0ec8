"""Tensors and Python values <-> protobuf messages. Without pickle: no received message can run code.

An `Encoder` turns the values of one message into protobuf and collects their tensors in one table; a
`Decoder` turns them back into values. A value that cannot be encoded raises an `Unencodable` that names the
path to it.

Each of the three levels has an encoding and a decoding module: values, the tensors in them, and the storages
that tensors view.

Calls that repeat have `plans`: `layouts` takes their values apart, and `tensor_contents` reads and writes the
bytes of their tensors, without protobuf.
"""

from .codecs import CODECS, COMPRESS_FROM, Codec, Residual, find_codec, require_codec, supported_codecs
from .layouts import Flat, Layout, PlannedValues, flatten
from .limits import MAX_DEPTH, Limits
from .messages import parse, refs_in
from .plans import MARK, Plans, ReceivedPlan, SentPlan, is_short
from .storage_decoding import Buffer
from .storage_encoding import Attachment
from .tensor_contents import EMPTY, LARGEST_SMALL, TensorMemory, read_memory, write_memory
from .tensor_encoding import size_if_simple
from .types import TypeRegistry, default_types, register_type
from .value_decoding import Decoder
from .value_encoding import ATTACH_FROM, Encoder

__all__ = [
    "ATTACH_FROM",
    "CODECS",
    "COMPRESS_FROM",
    "EMPTY",
    "LARGEST_SMALL",
    "MARK",
    "MAX_DEPTH",
    "Attachment",
    "Buffer",
    "Codec",
    "Decoder",
    "Encoder",
    "Flat",
    "Layout",
    "Limits",
    "PlannedValues",
    "Plans",
    "ReceivedPlan",
    "Residual",
    "SentPlan",
    "TensorMemory",
    "TypeRegistry",
    "default_types",
    "find_codec",
    "flatten",
    "is_short",
    "parse",
    "read_memory",
    "refs_in",
    "register_type",
    "require_codec",
    "size_if_simple",
    "supported_codecs",
    "write_memory",
]
