"""Tensors and Python values <-> protobuf messages. No pickle: nothing that comes in can run code.

An `Encoder` turns the values of one message into protobuf and lifts their tensors out into one table; a
`Decoder` takes them back. What cannot travel raises an `Unencodable` that names the path to it.
"""

from .codecs import CODECS, COMPRESS_FROM, Codec, Residual, find_codec, require_codec, supported_codecs
from .limits import MAX_DEPTH, Limits
from .messages import parse, refs_in
from .storages import Attachment
from .types import TypeRegistry, default_types, register_type
from .value_decoding import Decoder
from .value_encoding import ATTACH_FROM, Encoder

__all__ = [
    "ATTACH_FROM",
    "CODECS",
    "COMPRESS_FROM",
    "MAX_DEPTH",
    "Attachment",
    "Codec",
    "Decoder",
    "Encoder",
    "Limits",
    "Residual",
    "TypeRegistry",
    "default_types",
    "find_codec",
    "parse",
    "refs_in",
    "register_type",
    "require_codec",
    "supported_codecs",
]
