"""What a worker serves and holds: exposed functions, objects, optimizers, access to parameters."""
