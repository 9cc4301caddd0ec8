"""The command `gradwire-server`: options, configuration files, loading the user's modules, logging."""
