"""Peers: this process and the workers in it, the links to other peers, and the requests that they serve."""
