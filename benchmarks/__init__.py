"""Measurements of gradwire: ``python -m benchmarks``."""
