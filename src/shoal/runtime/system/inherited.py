"""What a process inherits from its parent, and could not work with.

Standard streams may be closed (`ssh host 'python train.py >&- 2>&- &'`): the next file or socket
would get such a stream's number, and what native code prints. SIGCHLD may be ignored, so that the
kernel drops the exit codes of children, or blocked, so that their end wakes no process.
"""

from __future__ import annotations

import os
import signal
import sys


def open_standard_streams() -> list[int]:
    """Open closed standard streams as /dev/null; return their numbers."""
    opened: list[int] = []
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            got = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if got != fd:  # another thread was faster
                os.close(got)
                continue
            os.set_inheritable(fd, True)
            opened.append(fd)
    return opened


def allow_child_ends() -> None:
    """Have the ends of children reported to this process, and to those that it starts."""
    if sys.platform == "win32":
        return
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
