"""Gradients across peers, on PyTorch's own engine. Knows nothing of gRPC.

Read `send_recv` first, the heart. Then:

- `messages` records what crosses in a call; `records` and `contexts` are what is remembered;
- `metadata` is what a message says of autograd; `responses`, `short_calls` and `short_gradients` write it, in
  full or by a plan;
- `graph_tasks` and `backward` run graphs; `propagating` requests the rest from other peers, `serving` serves
  such requests;
- `passes`, `releases` and `leases` say when what is remembered may go;
- `kept_state` makes it fast where a worker keeps state from call to call.
"""

from gradwire.autograd.backward import backward_to_leaves
from gradwire.autograd.borrowed_grad import borrowed_grad
from gradwire.autograd.contexts import DistAutogradContainer, DistAutogradContext
from gradwire.autograd.engine import DistEngine
from gradwire.autograd.engine_hooks import EngineHooks
from gradwire.autograd.gradients import nbytes
from gradwire.autograd.graph_tasks import BackwardRun
from gradwire.autograd.hooks import run_waiting_hooks
from gradwire.autograd.messages import receive_call, receive_response, send_call, send_results
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.autograd.modes import applied as applied_modes
from gradwire.autograd.modes import capture as capture_modes
from gradwire.autograd.releases import PeerReleases
from gradwire.autograd.responses import FullResponse, Response, ShortResponse, read_short
from gradwire.autograd.serving import serve_cleanup, serve_propagate
from gradwire.autograd.short_calls import ShortCall, short_call
from gradwire.wire.ids import AutogradMessageId, ContextId, message_ids, message_protos

__all__ = [
    "AutogradMessageId",
    "AutogradMetadata",
    "BackwardRun",
    "ContextId",
    "DistAutogradContainer",
    "DistAutogradContext",
    "DistEngine",
    "EngineHooks",
    "FullResponse",
    "PeerReleases",
    "Response",
    "ShortCall",
    "ShortResponse",
    "applied_modes",
    "backward_to_leaves",
    "borrowed_grad",
    "capture_modes",
    "message_ids",
    "message_protos",
    "nbytes",
    "read_short",
    "receive_call",
    "receive_response",
    "run_waiting_hooks",
    "send_call",
    "send_results",
    "serve_cleanup",
    "serve_propagate",
    "short_call",
]
