"""What code runs in, carried along with every call: the peer, the request, the deadline, the context."""
