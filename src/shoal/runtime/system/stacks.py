"""Dump the stacks of all threads, even while one of them hangs in native code."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import math
import os
import re
import signal
import struct
import sys
import threading
import time
import traceback
from typing import IO

from shoal.runtime.system.child_process import open_memory_file
from shoal.runtime.system.process_status import Seen, main_thread_s
from shoal.tracebacks import is_installed, is_own_file

MAX_BYTES = 64 << 10

_DUMP = getattr(signal, "SIGRTMAX", 0) - 3  # real-time: no program uses it by chance
_DUMP_NAME = "shoal-dump"
_SHOWN = struct.Struct("<3d")  # of the memory file: see `DumpFile`
_LIMIT = struct.Struct("<d")  # the last of it
_DUMP_S = 0.5
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
# How faulthandler writes what is not ASCII, of a path as well.
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_MOST_SOURCE = 120  # characters of a line
_READ_S = 1.0  # for the source lines of all
_LAUNCHER = os.path.join("launch", "child.py")
_HEAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+).*:$")


def stacks(max_bytes: int = MAX_BYTES) -> str:
    """Return the stacks of all Python threads, innermost frame first, the main thread's first.

    This is the interpreter's own dump, which runs no code of these threads, without the frames of
    the launcher, and with the source lines of the program. Long stacks lose their outermost frames.
    """
    with open_memory_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = _ESCAPED.sub(_unescaped, file.read().decode(errors="replace"))
    blocks = _with_sources([_without_launcher(_named(block)) for block in _blocks(text)])
    head = f"Thread {threading.main_thread().name!r} "
    blocks.sort(key=lambda block: not block[0].startswith(head))  # stable
    if not blocks or not blocks[0][0].startswith(head):
        blocks.insert(0, _main_block())
    return _cut(blocks, max_bytes)


def _unescaped(match: re.Match[str]) -> str:
    letter = int(match[1] or match[2] or match[3], 16)
    # A control character, or one that no text can hold, would be taken for something else.
    return chr(letter) if chr(min(letter, 0x10FFFF)).isprintable() else match[0]


class DumpFile:
    """The file in memory that shows this process to `seen` while native code holds its
    interpreter lock.

    The signal handler, which needs no lock, appends where the main thread stands. The head says
    when the watcher last ran, the processor time of the main thread until then, and the limit.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        file.write(_SHOWN.pack(0.0, 0.0, math.inf))  # the handler writes after it
        file.flush()

    def write(self, now: float, main_s: float, limit_s: float) -> None:
        """Write the head."""
        os.pwrite(self._file.fileno(), _SHOWN.pack(now, main_s, limit_s), 0)

    def write_limit(self, limit_s: float) -> None:
        """Change only the limit, between two looks of the watcher."""
        os.pwrite(self._file.fileno(), _LIMIT.pack(limit_s), _SHOWN.size - _LIMIT.size)


def register_dump() -> DumpFile | None:
    """Let `seen` look at this process; None if that is impossible here."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # no such signal or memory file
        if signal.getsignal(_DUMP) == signal.SIG_DFL:
            file = open_memory_file(_DUMP_NAME)
            shown = DumpFile(file)
            faulthandler.register(_DUMP, file, all_threads=False)
            return shown
    return None


def seen(pid: int) -> Seen:
    """Return what another process of this host does, even if it holds its interpreter lock."""
    try:
        path = _dump_path(pid)
        if path is None or not _catches(pid, _DUMP):
            return Seen()
        begin = os.stat(path).st_size
        os.kill(pid, _DUMP)
        limit = time.monotonic() + _DUMP_S
        while os.stat(path).st_size == begin and time.monotonic() < limit:
            time.sleep(0.01)
        with open(path, "rb") as file:
            at_s, main_s, limit_s = _SHOWN.unpack(file.read(_SHOWN.size))
            file.seek(begin)
            frames = _FRAME.findall(file.read().decode(errors="replace"))
        used_s = main_thread_s(pid) - main_s
        share = max(0.0, used_s) / max(time.monotonic() - at_s, 1e-3) if at_s else 1.0
    except (OSError, struct.error):
        return Seen()
    own = [frame for frame in frames if not is_installed(frame[0])] or frames
    sites = (f"{os.path.basename(file)}:{line} ({name})" for file, line, name in own)
    return Seen(next(sites, ""), share, limit_s)


def _dump_path(pid: int) -> str | None:
    fds = f"/proc/{pid}/fd"
    for fd in os.listdir(fds):
        with contextlib.suppress(OSError):  # it is closed meanwhile
            if _DUMP_NAME in os.readlink(f"{fds}/{fd}"):
                return f"{fds}/{fd}"
    return None


def _catches(pid: int, signal_number: int) -> bool:
    """Return whether a process handles a signal: it would end it otherwise."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        masks = [int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")]
    return any(mask >> (signal_number - 1) & 1 for mask in masks)


def _without_launcher(block: list[str]) -> list[str]:
    """Leave out the frames of the launcher, which stand above every program."""
    lines = block[:1]
    for line in block[1:]:
        match = _FRAME.search(line)
        file = "" if match is None else match[1]
        if file != "<frozen runpy>" and not (is_own_file(file) and file.endswith(_LAUNCHER)):
            lines.append(line)
    return lines


def _with_sources(blocks: list[list[str]]) -> list[list[str]]:
    """Add the source lines of the program, unless reading them takes long: its disk may hang."""
    read: list[list[list[str]]] = []
    name = "shoal source reader"
    if not any(thread.name == name for thread in threading.enumerate()):
        reader = threading.Thread(
            target=lambda: read.append([[*map(_with_source, block)] for block in blocks]),
            name=name,
            daemon=True,
        )
        with contextlib.suppress(RuntimeError):  # too many threads, or the interpreter exits
            reader.start()
            reader.join(_READ_S)
    return read[0] if read else blocks


def _with_source(line: str) -> str:
    match = _FRAME.search(line)
    if match is None or is_own_file(match[1]) or is_installed(match[1]):
        return line
    source = linecache.getline(match[1], int(match[2])).strip()
    return f"{line}: {source[:_MOST_SOURCE]}" if source else line


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
    match = _HEAD.match(block[0])
    if match is None:
        return block
    thread_id = int(match[1], 16)
    name = next((t.name for t in threading.enumerate() if t.ident == thread_id), "")
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
