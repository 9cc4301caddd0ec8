"""Snapshots: directories that hold a state, replaced atomically, and checked when they are read.

Both `gw.save` and the worker's state directory use them. A snapshot has a ``manifest.json`` and a
sub-directory with the tensors in safetensors files. The manifest lists the files with their hashes.
"""

from .damage import reading
from .directory import DirectoryLock, SnapshotReader, SnapshotWriter
from .values import encoded_dict

__all__ = ["DirectoryLock", "SnapshotReader", "SnapshotWriter", "encoded_dict", "reading"]
