"""What has to be done on a thread before torch computes on it."""

from __future__ import annotations

import torch

__all__ = ["keep_to_torch_threads"]


def keep_to_torch_threads() -> None:
    """Makes `torch.set_num_threads` hold on the thread that calls this. Cheap, so for every task anew.

    torch passes the number on to OpenMP and MKL when a thread first asks for it. On a thread that has not,
    a matrix product uses all cores, and its sums come out in another order than everywhere else.
    """
    torch.get_num_threads()
