"""The fuzz targets: one small module for each kind of input."""

from __future__ import annotations

from tests.fuzz.target import Target
from tests.fuzz.targets.codecs import Codecs
from tests.fuzz.targets.config import Config
from tests.fuzz.targets.descriptions import Descriptions
from tests.fuzz.targets.errors import Errors
from tests.fuzz.targets.gradients import FullGradients, ShortGradients
from tests.fuzz.targets.handshakes import Hellos, Welcomes
from tests.fuzz.targets.metadata import Metadata
from tests.fuzz.targets.plans import PlannedCalls, PlannedResults
from tests.fuzz.targets.requests import Requests
from tests.fuzz.targets.sessions import Sessions
from tests.fuzz.targets.snapshots import Checkpoints, State
from tests.fuzz.targets.tensors import Tensors
from tests.fuzz.targets.values import Values

__all__ = ["TARGETS"]

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        Hellos,
        Welcomes,
        Sessions,
        Errors,
        Values,
        Tensors,
        Codecs,
        PlannedCalls,
        PlannedResults,
        Metadata,
        FullGradients,
        ShortGradients,
        Requests,
        Descriptions,
        Checkpoints,
        State,
        Config,
    )
}
