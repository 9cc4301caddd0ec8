"""Modules whose parameters live on a worker."""

from gradwire.training.modules import RemoteModule

__all__ = ["RemoteModule"]
