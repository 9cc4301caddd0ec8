"""Imports everything that `gradwire` offers, torch included.

`gradwire.__getattr__` imports this module when a public name is first used: the command line loads the
package for its help, and must not wait for torch. Each name is imported as itself, which is how type checkers
know that it is public; `gradwire.__all__` lists the names.
"""

import gradwire.nn
import gradwire.optim  # noqa: F401
from gradwire.api.calls import CallFuture as CallFuture
from gradwire.api.calls import Keywords as Keywords
from gradwire.api.compression import compression as compression
from gradwire.api.connecting import connect as connect
from gradwire.api.contexts import Context as Context
from gradwire.api.contexts import context as context
from gradwire.api.contexts import current_context as current_context
from gradwire.api.function_info import FunctionInfo as FunctionInfo
from gradwire.api.refs import RemoteRef as RemoteRef
from gradwire.api.workers import RemoteFunction as RemoteFunction
from gradwire.api.workers import RemoteWorker as RemoteWorker
from gradwire.api.workers import caller as caller
from gradwire.runtime.compression import Compression as Compression
from gradwire.runtime.scope import cancelled as cancelled
from gradwire.runtime.scope import deadline as deadline
from gradwire.runtime.scope import timeout as timeout
from gradwire.tools.gradcheck import CodecReport as CodecReport
from gradwire.tools.gradcheck import CodecRow as CodecRow
from gradwire.tools.gradcheck import GradcheckReport as GradcheckReport
from gradwire.tools.gradcheck import GradcheckRow as GradcheckRow
from gradwire.tools.gradcheck import codec_error as codec_error
from gradwire.tools.gradcheck import gradcheck as gradcheck
from gradwire.tools.malloc import tune_malloc as tune_malloc
from gradwire.training.checkpoints import LoadedKeys as LoadedKeys
from gradwire.training.checkpoints import load as load
from gradwire.training.checkpoints import save as save
from gradwire.transport import Tls as Tls
from gradwire.transport import Traffic as Traffic
from gradwire.wire import register_type as register_type
