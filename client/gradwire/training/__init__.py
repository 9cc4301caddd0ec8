"""Training: modules and optimizers whose parameters live on workers, and checkpoints."""
