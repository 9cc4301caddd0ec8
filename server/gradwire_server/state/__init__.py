"""The state directory: named objects that outlive the worker's process."""
