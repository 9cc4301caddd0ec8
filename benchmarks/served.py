"""What a measured gradwire worker serves: the functions of `functions.py`, and a chain of workers."""

from __future__ import annotations

import os

from torch import Tensor

import gradwire_server as gws
from benchmarks import functions
from benchmarks.contenders import Carrier
from benchmarks.runtimes.gradwire import CARRIER_VARIABLE, connect

for function in functions.FUNCTIONS.values():
    gws.expose(function)
for module in functions.MODULES.values():
    gws.expose(module)

CARRIER = Carrier(os.environ.get(CARRIER_VARIABLE, Carrier.SAME_HOST.value))


@gws.expose
def chain(x: Tensor, route: list[str]) -> Tensor:
    """Works a little, and passes the result on along the route."""
    y = functions.scale(x)
    if not route:
        return y
    result: Tensor = connect(route[0], CARRIER).call("chain", y, route[1:])
    return result
