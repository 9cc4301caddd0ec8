"""Measurements of gradwire beside ``torch.distributed.rpc``: ``python -m benchmarks``."""
