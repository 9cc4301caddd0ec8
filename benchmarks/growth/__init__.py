"""How the cost of a step grows: ``python -m benchmarks.growth``."""
