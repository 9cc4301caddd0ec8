"""Gradients across nodes, on PyTorch's own engine. Knows nothing of gRPC.

Read `nodes` first: the two nodes that it adds to the graph. `engine` records what crosses, `passes`
and `local` run backward, `propagating` asks other nodes for their part, `serving` answers those who ask this
node. `regions`, `merging` and `holding` make it cheap where a worker keeps state from call to call.
"""

from gradwire.autograd.borrowing import borrowed_grad
from gradwire.autograd.contexts import DistAutogradContainer, DistAutogradContext
from gradwire.autograd.engine import DistEngine
from gradwire.autograd.graph_tasks import BackwardRun
from gradwire.autograd.hooks import run_waiting_hooks
from gradwire.autograd.local import backward_to_leaves
from gradwire.autograd.modes import applied as applied_modes
from gradwire.autograd.modes import capture as capture_modes
from gradwire.autograd.records import Releases, nbytes
from gradwire.autograd.serving import serve_cleanup, serve_propagate
from gradwire.wire.ids import AutogradMessageId, ContextId, message_ids, message_protos

__all__ = [
    "AutogradMessageId",
    "BackwardRun",
    "ContextId",
    "DistAutogradContainer",
    "DistAutogradContext",
    "DistEngine",
    "Releases",
    "applied_modes",
    "backward_to_leaves",
    "borrowed_grad",
    "capture_modes",
    "message_ids",
    "message_protos",
    "nbytes",
    "run_waiting_hooks",
    "serve_cleanup",
    "serve_propagate",
]
