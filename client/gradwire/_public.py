"""All that `gradwire` offers, loaded at once.

Apart from the package itself, which the command line loads for its help: that must not wait for torch.
"""

import gradwire.nn as nn
import gradwire.optim as optim
from gradwire.api.calls import CallFuture, Keywords
from gradwire.api.compression import compression
from gradwire.api.contexts import Context, context, current_context
from gradwire.api.function_info import FunctionInfo
from gradwire.api.refs import RemoteRef
from gradwire.api.workers import RemoteFunction, RemoteWorker, caller, connect
from gradwire.runtime.compression import Compression
from gradwire.runtime.scope import cancelled, deadline, timeout
from gradwire.tools.gradcheck import (
    CodecReport,
    CodecRow,
    GradcheckReport,
    GradcheckRow,
    codec_error,
    gradcheck,
)
from gradwire.tools.malloc import tune_malloc
from gradwire.training.checkpoints import LoadedKeys, load, save
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
