"""Write what a program has left in the buffers of its open files.

Python does so when it deletes the program's names at its end. It never comes to that where the
process ends without teardown, or where a thread that lives longer holds a function of the program.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def write_open_files() -> None:
    """Flush all open regular files of this process; a full disk is ignored.

    Not pipes or sockets, which may block. For the main thread: another one may hold a file.
    """
    # `type`: `isinstance` would ask a lazy proxy for its class, and so load what it stands for.
    found = [one for one in gc.get_objects() if issubclass(type(one), _BUFFERED)]
    # A text's buffer is one of them, too: texts first.
    for file in sorted(found, key=lambda one: not isinstance(one, io.TextIOWrapper)):
        with contextlib.suppress(Exception):
            if file.writable() and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.flush()
