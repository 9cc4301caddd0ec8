"""gradwire beside what one would use in its place: ``python -m benchmarks.peers``."""
