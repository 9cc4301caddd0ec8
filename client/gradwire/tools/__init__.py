"""Tools beside training: checking gradients, tuning malloc."""
