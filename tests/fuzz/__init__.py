"""Fuzzing: inputs that were changed at random, for everything in gradwire that reads bytes from elsewhere.

Run by ``make fuzz``, and for a moment by ``make test``.
"""
