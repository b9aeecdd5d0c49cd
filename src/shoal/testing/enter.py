"""Enter kernel namespaces, then exec another program: `enter.py NET UTS COMMAND…`.

NET and UTS are paths of a network and a UTS (host name) namespace. Run as a file, without
site-packages, so that it takes only milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["enter"]


def enter(fd: int) -> None:
    """Move this thread and its future children into a namespace (setns(2))."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns exists only since Python 3.12
    if libc.setns(fd, 0) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"setns: {os.strerror(error_number)}")


if __name__ == "__main__":
    for path in sys.argv[1:3]:
        fd = os.open(path, os.O_RDONLY)
        enter(fd)
        os.close(fd)
    os.execvp(sys.argv[3], sys.argv[3:])
