"""gradwire: call functions and modules in other processes, and backpropagate through the calls.

>>> import gradwire as gw
>>> worker = gw.connect("gpu-box:50051")        # doctest: +SKIP
>>> worker.encode(torch.ones(3))                # doctest: +SKIP
"""

from gradwire import errors, nn, optim
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
from gradwire._version import __version__
from gradwire._workers import RemoteFunction, RemoteWorker, caller, connect
from gradwire.errors import *  # noqa: F403 - the whole tree is public
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
    "__version__",
    "caller",
    "cancelled",
    "codec_error",
    "compression",
    "connect",
    "context",
    "current_context",
    "deadline",
    "errors",
    "gradcheck",
    "load",
    "nn",
    "optim",
    "register_type",
    "save",
    "timeout",
    "tune_malloc",
    *errors.__all__,
]
