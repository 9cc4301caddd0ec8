"""What a trainer calls: workers, functions, references, contexts."""
