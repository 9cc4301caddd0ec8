"""All that `gradwire` offers, loaded at once.

Apart from the package itself, which the command line loads for its help: that must not wait for torch.
"""

import gradwire.nn as nn
import gradwire.optim as optim
from gradwire._calls import CallFuture, Keywords
from gradwire._checkpoints import LoadedKeys, load, save
from gradwire._compression import Compression, compression
from gradwire._contexts import Context, context, current_context
from gradwire._describe import FunctionInfo
from gradwire._gradcheck import (
    CodecReport,
    CodecRow,
    GradcheckReport,
    GradcheckRow,
    codec_error,
    gradcheck,
)
from gradwire._malloc import tune_malloc
from gradwire._refs import RemoteRef
from gradwire._scope import cancelled, deadline, timeout
from gradwire._workers import RemoteFunction, RemoteWorker, caller, connect
from gradwire.transport import Traffic
from gradwire.wire import register_type

__all__ = [
    "CallFuture",
    "CodecReport",
    "CodecRow",
    "Compression",
    "Context",
    "FunctionInfo",
    "GradcheckReport",
    "GradcheckRow",
    "Keywords",
    "LoadedKeys",
    "RemoteFunction",
    "RemoteRef",
    "RemoteWorker",
    "Traffic",
    "caller",
    "cancelled",
    "codec_error",
    "compression",
    "connect",
    "context",
    "current_context",
    "deadline",
    "gradcheck",
    "load",
    "nn",
    "optim",
    "register_type",
    "save",
    "timeout",
    "tune_malloc",
]
