"""Random programs over workers, compared step by step with the same in one process of plain PyTorch."""
