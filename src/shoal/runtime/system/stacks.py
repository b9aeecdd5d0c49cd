"""Dump the stacks of all threads, even while one of them hangs in native code."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback

from shoal.runtime.system.failure_words import is_installed
from shoal.runtime.system.memory_file import open_memory_file

MAX_BYTES = 64 << 10

_DUMP = getattr(signal, "SIGRTMAX", 0) - 3  # real-time: no program uses it by chance
_DUMP_NAME = "shoal-dump"
_DUMP_S = 0.5
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_HEAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+).*:$")


def stacks(max_bytes: int = MAX_BYTES) -> str:
    """Return the stacks of all Python threads, innermost frame first, the main thread's first.

    This is the interpreter's own dump, which runs no code of these threads. Long stacks lose their
    outermost frames.
    """
    with open_memory_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    blocks = [_named(block) for block in _blocks(text)]
    head = f"Thread {threading.main_thread().name!r} "
    blocks.sort(key=lambda block: not block[0].startswith(head))  # stable
    if not blocks or not blocks[0][0].startswith(head):
        blocks.insert(0, _main_block())
    return _cut(blocks, max_bytes)


def register_dump() -> None:
    """Let `dumped_site` find where this process stands, even if it holds the interpreter lock."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # no such signal or memory file
        if signal.getsignal(_DUMP) == signal.SIG_DFL:
            # It keeps the file open.
            faulthandler.register(_DUMP, open_memory_file(_DUMP_NAME), all_threads=False)


def dumped_site(pid: int) -> str:
    """Return where another process of this host stands in its program; "" if that is unknown.

    Its signal handler, which needs no interpreter lock, writes it to its memory file.
    """
    try:
        if not _catches(pid, _DUMP):
            return ""
        fds = f"/proc/{pid}/fd"
        paths = [f"{fds}/{fd}" for fd in os.listdir(fds)]
        path = next(path for path in paths if _DUMP_NAME in os.readlink(path))
        begin = os.stat(path).st_size
        os.kill(pid, _DUMP)
        limit = time.monotonic() + _DUMP_S
        while os.stat(path).st_size == begin and time.monotonic() < limit:
            time.sleep(0.01)
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(begin)
            frames = _FRAME.findall(file.read())
    except (OSError, StopIteration):
        return ""
    own = [frame for frame in frames if not is_installed(frame[0])] or frames
    return next((f"{os.path.basename(file)}:{line} ({name})" for file, line, name in own), "")


def _catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal: it would end it otherwise."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        masks = [int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def innermost(text: str, frames: int = 3) -> list[str]:
    """Return the first frames of the first thread in `text`, one line each."""
    block = next(iter(_blocks(text)), [])
    return [line.strip() for line in block[1:] if line.startswith("  File ")][:frames]


def _main_block() -> list[str]:
    """Return the main thread's block, which the dump omits after a hundred younger threads."""
    main = threading.main_thread()
    lines = [f"Thread {main.name!r} (most recent call first):"]
    innermost_frame = sys._current_frames().get(main.ident or 0)
    for frame, line in traceback.walk_stack(innermost_frame) if innermost_frame else ():
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
    return lines


def _blocks(text: str) -> list[list[str]]:
    """Return the lines of each thread; the first line is its head."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith(" ") and line.endswith(":"):
            blocks.append([line])
        elif blocks and line.strip():
            blocks[-1].append(line)
    return blocks


def _named(block: list[str]) -> list[str]:
    """Replace the thread's number with its name."""
    found = _HEAD.match(block[0])
    if found is None:
        return block
    number = int(found[1], 16)
    name = next((t.name for t in threading.enumerate() if t.ident == number), "")
    return [f"Thread {name!r} (most recent call first):" if name else block[0], *block[1:]]


def _cut(blocks: list[list[str]], max_bytes: int) -> str:
    """Return the text of all blocks, each cut to the same number of lines."""
    most = max((len(block) for block in blocks), default=0)
    while True:
        shown = [
            block if len(block) <= most else [*block[:most], f"  ... {len(block) - most} more"]
            for block in blocks
        ]
        text = "\n\n".join("\n".join(block) for block in shown)
        data = text.encode()
        if len(data) <= max_bytes or most <= 2:
            return data[:max_bytes].decode(errors="ignore")
        most = max(2, most * 3 // 4)
