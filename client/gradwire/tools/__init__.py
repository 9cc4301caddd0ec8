"""Tools beside training: checking gradients and codecs, tuning malloc."""
