"""Optimizers over parameters here and on workers: a step is made everywhere or nowhere."""

from gradwire.training.optimizers import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
