"""The scope that code runs in: its peer, the request that it serves, the deadline, the autograd context."""
