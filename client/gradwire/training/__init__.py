"""What a training loop needs: modules and optimizers whose parameters live on workers, and checkpoints."""
