"""What a measured gradwire worker serves: the functions of `functions.py`, and a chain of workers."""

from __future__ import annotations

import os

from torch import Tensor

import gradwire_server as gws
from benchmarks import functions
from benchmarks.runtimes.gradwire import SAME_HOST_VARIABLE, connect

for function in functions.FUNCTIONS.values():
    gws.expose(function)
for module in functions.MODULES.values():
    gws.expose(module)

SAME_HOST = os.environ.get(SAME_HOST_VARIABLE, "1") == "1"


@gws.expose
def chain(x: Tensor, route: list[str]) -> Tensor:
    """Works a little, and passes the result on along the route."""
    y = functions.scale(x)
    if not route:
        return y
    result: Tensor = connect(route[0], same_host=SAME_HOST).call("chain", y, route[1:])
    return result
