"""The API of a trainer: handles to workers, calls, refs to remote values, and contexts."""
