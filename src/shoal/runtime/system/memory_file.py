"""A temporary file without a name."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import IO


def open_memory_file(name: str = "shoal") -> IO[bytes]:
    """Open an empty file that ends with its last descriptor.

    On Linux it lies in memory (memfd_create(2)): no directory need be writable, as in a container
    whose file system is read-only.
    """
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile()
