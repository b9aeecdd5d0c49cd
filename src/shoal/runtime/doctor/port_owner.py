"""Find the process of this host that listens at a port, as Linux shows it."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from pathlib import Path

_LISTEN = "0A"
_MOST_WORDS = 60


def port_owner(port: int) -> str:
    """Return `pid 7 (python train.py)`; "" if no process is found that this user may see."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for link in glob.iglob("/proc/[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if os.readlink(link) in sockets:
                pid = int(link.split("/")[2])
                return f"pid {pid} ({_command(pid)})"
    return ""


def _listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen at a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found


def _command(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    words[0] = os.path.basename(words[0])
    text = " ".join(word.decode(errors="replace") for word in words if word)
    text = re.sub(r"\s+", " ", text) or "?"
    return text if len(text) <= _MOST_WORDS else text[: _MOST_WORDS - 1] + "…"
