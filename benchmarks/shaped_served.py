"""What the worker at the other end of a slow line serves."""

import torch

import gradwire_server as gws

WIDTH = 128
TOKENS = 1000

_generator = torch.Generator().manual_seed(0)
weight = (torch.randn(WIDTH, WIDTH, generator=_generator) / WIDTH**0.5).requires_grad_()
table = torch.randn(TOKENS, WIDTH, generator=_generator).requires_grad_()


@gws.expose
def layer(x: torch.Tensor) -> torch.Tensor:
    """Half of a model: as much comes back as goes in."""
    return torch.tanh(x @ weight)


@gws.expose
def embed(ids: torch.Tensor) -> torch.Tensor:
    """Features of tokens: little goes in, much comes back."""
    return torch.tanh(torch.nn.functional.embedding(ids, table))
