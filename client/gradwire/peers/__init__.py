"""This process as a peer of others: what it answers, and its connections to workers."""
