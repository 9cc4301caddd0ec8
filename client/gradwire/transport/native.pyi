"""What is faster in C++: compiled from native/ (see CONTRIBUTING.md)."""

compiler: str
"""What it was built with, e.g. "g++ 12.2.0"."""
