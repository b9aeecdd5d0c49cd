"""Enter namespaces of the kernel, then become another program: `enter.py NET UTS COMMAND…`.

NET and UTS are paths of a network and a host name namespace. Run as a file, without the site
packages, so that it costs a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["enter"]


def enter(fd: int) -> None:
    """Move this thread, and what it starts from now on, into a namespace (setns(2))."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns exists only since Python 3.12
    if libc.setns(fd, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


if __name__ == "__main__":
    for path in sys.argv[1:3]:
        fd = os.open(path, os.O_RDONLY)
        enter(fd)
        os.close(fd)
    os.execvp(sys.argv[3], sys.argv[3:])
