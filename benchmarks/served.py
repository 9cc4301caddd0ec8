"""What the measured worker serves."""

import torch

import gradwire_server as gws

weight = torch.ones(16, requires_grad=True)


@gws.expose
def echo(x: torch.Tensor) -> torch.Tensor:
    """Returns its argument."""
    return x


@gws.expose
def scale(x: torch.Tensor) -> torch.Tensor:
    """A little work with a parameter."""
    return torch.tanh(x * weight)
