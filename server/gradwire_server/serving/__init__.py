"""Requests: accepting sessions and unary calls, giving each a thread, running the function."""
