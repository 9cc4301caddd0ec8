"""Snapshots: directories that hold a state, written whole or not at all, and checked when they are read.

Behind both `gw.save` and the worker's state directory. One directory has a ``manifest.json`` and, in a
sub-directory of its own, the tensors in safetensors files. The manifest names the files with their hashes.
"""

from .directory import DirectoryLock, SnapshotReader, SnapshotWriter
from .values import encoded_dict

__all__ = ["DirectoryLock", "SnapshotReader", "SnapshotWriter", "encoded_dict"]
