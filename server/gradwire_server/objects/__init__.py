"""What a worker serves and holds: exposed functions, objects, optimizers, locks on parameters."""
