"""A small network that tells handwritten digits apart, in three parts.

Workers serve the parts: ``gradwire-server serve demo_model``. They are plain PyTorch: put together in one
process, the same classes are the whole model.
"""

from __future__ import annotations

from torch import nn

import gradwire_server as gws


class Stem(nn.Sequential):
    """An image of 8×8 pixels to 16 feature maps."""

    def __init__(self) -> None:
        super().__init__(*_convolution(1, 16))


@gws.expose
class Middle(nn.Sequential):
    """16 feature maps of 8×8 to 32 of 4×4."""

    def __init__(self) -> None:
        super().__init__(*_convolution(16, 32), nn.MaxPool2d(2), *_convolution(32, 32))


@gws.expose
class Head(nn.Sequential):
    """Feature maps to a score for each of the ten digits."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()
