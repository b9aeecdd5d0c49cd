"""The stacks of a process as text: taken apart, and shown as Python shows a traceback.

A process sends its stacks as `system.stacks` writes them, the innermost frame first. A person reads
them as tracebacks: the outermost frame first, the program's own frames with their source lines, and
how many frames of each package stand below.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from shoal import settings
from shoal.errors import counted
from shoal.runtime.system.foreign_text import ANNOUNCES
from shoal.tracebacks import is_installed, is_own_file

_OWN_THREAD = "shoal "  # how the names of shoal's threads begin
_THREAD = re.compile(r"(?:Current thread|Thread) (['\"]?)(.*?)\1(?: \(most recent call first\))?:")
_FRAME = re.compile(r'\s*File "(.*?)", line (\d+) in (.+?)(?:: (.*))?')
_RAISED = re.compile(r'\s*File "(.*?)", line \d+, in .+')  # a frame as in a traceback
_CUT = re.compile(r"\s*\.\.\.(?: (\d+) more)?")  # faulthandler says no number
_IN_PYTHON = re.compile(
    r"<frozen ([\w.]+)>|.*/lib(?:64)?/python[\d.]+/(?!(?:site|dist)-packages/)(.+)"
)
_IN_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(.+)")
_FEW = 3  # frames, where none is the program's
_UNKNOWN = -1  # number of frames
_GENERATED = "generated code"


class StackLine(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    function: str
    source: str = ""  # the line's; of the program's own frames alone
    package: str = ""  # that it belongs to; "": the program


class ThreadStack(NamedTuple):
    """The stack of one thread."""

    name: str
    frames: tuple[StackLine, ...]  # the outermost first
    more: int = 0  # outermost frames that are left out
    is_own: bool = False  # a thread of shoal

    @property
    def of_program(self) -> tuple[StackLine, ...]:
        """The program's own frames; the innermost three if there are none."""
        own = tuple(frame for frame in self.frames if not frame.package)
        # The code of `python -c` has no other frames; that of a dataclass does.
        given = tuple(frame for frame in self.frames if frame.package == _GENERATED)
        return own or given or self.frames[-_FEW:]

    @property
    def below(self) -> dict[str, int]:
        """How many frames of each package stand below the last one of the program."""
        last = max((n for n, frame in enumerate(self.frames) if not frame.package), default=None)
        if last is None:
            return {}
        return dict(Counter(frame.package for frame in self.frames[last + 1 :]))

    def lines(self, most: int | None = None) -> list[str]:
        """Return it as a traceback: at most this many frames, the innermost ones.

        >>> stack = ThreadStack("MainThread", (StackLine("train.py", 8, "load", "get()"),
        ...                     StackLine("/lib/python3.11/queue.py", 9, "get", package="queue")))
        >>> print(*stack.lines(), sep="\\n")
        File "train.py", line 8, in load
          get()
        … 1 frame in queue
        """
        frames, below = self.frames, ""
        if settings.text("SHOAL_TRACEBACK") != "full":
            frames, below = self.of_program, counted_frames(self.below)
        lines: list[str] = []
        if most is not None:
            frames = frames[-most:]
        elif self.more == _UNKNOWN:
            lines.append("… more frames")
        elif self.more:
            lines.append(f"… {counted(self.more, 'frame')}")
        for frame, run in itertools.groupby(frames):
            lines.append(f'File "{frame.file}", line {frame.line}, in {frame.function}')
            if frame.source:
                lines.append(f"  {frame.source}")
            again = len([*run]) - 1
            if again:
                lines.append(f"… the same frame {counted(again, 'time')}")
        if below:
            lines.append(f"… {below}")
        return lines


def threads_of(text: str) -> list[ThreadStack]:
    """Return the stacks in a text, those of shoal's own threads included; [] if it has none."""
    from shoal.runtime.failures.shortening import printable, without_secrets

    threads: list[ThreadStack] = []
    name: str | None = None
    frames: list[StackLine] = []
    more = 0
    for line in [*text.split("\n"), "Thread '':"]:
        head = _THREAD.fullmatch(line)
        if head:
            if name is not None:  # the first one is the main thread's, whatever its name
                runs_program = any(not frame.package for frame in frames)  # a reader of `feed`
                is_own = bool(threads) and name.startswith(_OWN_THREAD) and not runs_program
                threads.append(ThreadStack(name, tuple(reversed(frames)), more, is_own))
            name, frames, more = printable(head[2]), [], 0
        elif name is not None and (match := _FRAME.fullmatch(line)):
            file, line_number, function = match[1], int(match[2]), printable(match[3])
            source = without_secrets(printable(match[4] or ""))
            package = package_of(file)
            frames.append(
                StackLine(
                    file=printable(file),
                    line=line_number,
                    function=function,
                    source=source,
                    package=package,
                )
            )
        elif cut := _CUT.fullmatch(line):
            more = int(cut[1] or _UNKNOWN)
    return threads


def without_packages(message: str) -> str:
    """Return a message without the frames of packages in a traceback that it quotes, as JAX's
    errors quote that of a callback.

    >>> message = 'Traceback (most recent call last):\\n  File "{}", line 9, in f\\nKeyError'
    >>> print(without_packages(message.format("/venv/lib/python3.11/site-packages/jax/api.py")))
    Traceback (most recent call last):
    KeyError
    """
    first, announces, rest = message.partition(ANNOUNCES)
    lines: list[str] = []
    is_shown = True
    for line in rest.split("\n"):
        frame = _RAISED.fullmatch(line)
        if frame:
            is_shown = not package_of(frame[1])
        elif not line.startswith("    "):  # else the source of the frame above
            is_shown = True
        if is_shown:
            lines.append(line)
    return "".join((first, announces, "\n".join(lines)))


def shown_stacks(text: str) -> str:
    """Return the stacks of the program's threads as tracebacks, or the text if it holds none."""
    threads = [thread for thread in threads_of(text) if not thread.is_own]
    if not threads:
        return text
    blocks = [thread.lines() for thread in threads]
    for thread, block in zip(threads[1:], blocks[1:], strict=True):
        block.insert(0, f"Thread '{thread.name}':")
    return "\n\n".join("\n".join(block) for block in blocks)


def package_of(file: str) -> str:
    """Return the package that a file belongs to, on whatever host it lies; "" if it may be the
    program's.

    >>> package_of("/venv/lib/python3.11/site-packages/jax/api.py"), package_of("/home/me/train.py")
    ('jax', '')
    """
    _, is_within, module = file.rpartition("/shoal/")
    if is_own_file(file) or (is_within and module in _own_modules()):
        return "shoal"
    if file == "<string>":
        return _GENERATED
    match = _IN_PACKAGES.fullmatch(file)
    if match:
        return _first(match[1])
    match = _IN_PYTHON.fullmatch(file)
    if match:
        return _first(match[1] or match[2])
    if is_installed(file):
        return "Python"
    return ""


def _first(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py").partition(".")[0]


@functools.cache
def _own_modules() -> frozenset[str]:
    """Return the paths of shoal's modules within the package: that may lie elsewhere there."""
    import pkgutil

    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths, folders = {"__init__.py"}, [(package, "")]
    while folders:
        folder, prefix = folders.pop()
        for part in pkgutil.iter_modules([folder]):
            path = f"{prefix}{part.name}"
            if part.ispkg:
                paths.add(f"{path}/__init__.py")
                folders.append((os.path.join(folder, part.name), f"{path}/"))
            else:
                paths.add(f"{path}.py")
    return frozenset(paths)


def counted_frames(packages: Mapping[str, int]) -> str:
    """Return how many frames are of which packages, shoal last; empty if there are none.

    >>> counted_frames({"shoal": 4, "queue": 1, "jax": 2})
    '2 frames in jax, 1 in queue, 4 in shoal'
    """
    counts = sorted(packages.items(), key=lambda pair: (pair[0] == "shoal", -pair[1], pair[0]))
    if not counts:
        return ""
    (package, count), *rest = counts
    first = f"{counted(count, 'frame')} in {package}"
    return ", ".join([first, *(f"{count} in {package}" for package, count in rest)])
