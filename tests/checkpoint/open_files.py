"""The files that this process has open."""

from __future__ import annotations

import contextlib
import os

_DESCRIPTORS = "/proc/self/fd"


def open_files_below(path):
    """Return the open files below `path`, removed ones too; where /proc does not tell, none.

    Only these: threads of other tests of this process may open and close files of their own.
    """
    found = []
    for descriptor in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.append(os.readlink(f"{_DESCRIPTORS}/{descriptor}"))
    return [name for name in found if name.startswith(f"{path}{os.sep}")]
