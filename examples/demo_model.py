"""A small convolutional network for 8×8 images of digits, in three parts.

Workers serve the parts: ``gradwire-server serve demo_model``. They are plain modules: the same classes, put
together in one process, are the whole model.
"""

from __future__ import annotations

import torch
from torch import nn

import gradwire_server as gws

# Sums are made in the same order in every process, so that their results can be compared to the last bit.
torch.set_num_threads(1)


class Stem(nn.Sequential):
    """Images to 16 feature maps. It stays in the trainer, and so do the images."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())


@gws.expose
class Middle(nn.Sequential):
    """16 feature maps of 8×8 to 32 of 4×4."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        )  # fmt: skip


@gws.expose
class Head(nn.Sequential):
    """Feature maps to a score for each digit."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))
