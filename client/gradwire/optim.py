"""Optimizers over parameters here and on workers, stepped all together or not at all."""

from gradwire.training.optimizers import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
