"""The stacks of a process as text: taken apart, and shown as Python shows a traceback.

A process sends its stacks as `system.stacks` writes them, the innermost frame first. A person reads
them as tracebacks: the outermost frame first, the program's own frames with their source lines, and
how many frames of each package stand below.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shoal import settings
from shoal.tracebacks import is_installed, is_own_file

_OWN_THREAD = "shoal "  # how the names of shoal's threads begin
_THREAD = re.compile(r"Thread '?(.*?)'?(?: \(most recent call first\))?:")
_FRAME = re.compile(r'\s*File "(.*?)", line (\d+) in (.+?)(?:: (.*))?')
_CUT = re.compile(r"\s*\.\.\. (\d+) more")
_IN_PYTHON = re.compile(
    r"<frozen ([\w.]+)>|.*/lib(?:64)?/python[\d.]+/(?!(?:site|dist)-packages/)(.+)"
)
_IN_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(.+)")
_FEW = 3  # frames, where none is the program's


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

    @property
    def is_own(self) -> bool:
        """Whether it is a thread of shoal."""
        return self.name.startswith(_OWN_THREAD)

    @property
    def of_program(self) -> tuple[StackLine, ...]:
        """The program's own frames; the innermost three if there are none."""
        own = tuple(frame for frame in self.frames if not frame.package)
        return own or self.frames[-_FEW:]

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
        is_full = settings.text("SHOAL_TRACEBACK") == "full"
        frames = self.frames if is_full else self.of_program
        shown = frames if most is None else frames[-most:]
        left = self.more if most is None else 0
        lines = [f"… {left} frames"] if left else []
        for frame in shown:
            lines.append(f'File "{frame.file}", line {frame.line}, in {frame.function}')
            lines += [f"  {frame.source}"] if frame.source else []
        return lines if is_full else [*lines, *_counted(self.below)]


def threads_of(text: str) -> list[ThreadStack]:
    """Return the stacks in a text, those of shoal's own threads included; [] if it has none."""
    threads: list[ThreadStack] = []
    name: str | None = None
    frames: list[StackLine] = []
    more = 0
    for line in [*text.splitlines(), "Thread '':"]:
        if head := _THREAD.fullmatch(line):
            if name is not None:
                threads.append(ThreadStack(name, tuple(reversed(frames)), more))
            name, frames, more = head[1], [], 0
        elif name is not None and (found := _FRAME.fullmatch(line)):
            file, number, function, source = found.groups()
            package = package_of(file)
            frames.append(StackLine(file, int(number), function, source or "", package))
        elif cut := _CUT.fullmatch(line):
            more = int(cut[1])
    return threads


def shown_stacks(text: str) -> str:
    """Return the stacks of the program's threads as tracebacks, or the text if it holds none."""
    threads = [thread for thread in threads_of(text) if not thread.is_own]
    if not threads:
        return text
    blocks = [
        [*([] if number == 0 else [f"Thread '{thread.name}':"]), *thread.lines()]
        for number, thread in enumerate(threads)
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def package_of(file: str) -> str:
    """Return the package that a file belongs to, on whatever host it lies; "" if it may be the
    program's.

    >>> package_of("/venv/lib/python3.11/site-packages/jax/api.py"), package_of("/home/me/train.py")
    ('jax', '')
    """
    if is_own_file(file) or _in_shoal().fullmatch(file):
        return "shoal"
    if found := _IN_PACKAGES.fullmatch(file):
        return _first(found[1])
    if found := _IN_PYTHON.fullmatch(file):
        return _first(found[1] or found[2])
    return "Python" if is_installed(file) else ""


def _first(path: str) -> str:
    return path.partition("/")[0].removesuffix(".py").partition(".")[0]


@functools.cache
def _in_shoal() -> re.Pattern[str]:
    """Return what matches the paths of shoal's files wherever it lies: a zip file, a checkout."""
    import pkgutil

    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    parts = [
        rf"{part.name}/.*" if part.ispkg else rf"{part.name}\.py"
        for part in pkgutil.iter_modules([folder])
    ]
    return re.compile(rf".*/shoal/(?:{'|'.join(parts)}|__init__\.py)")


def _counted(packages: dict[str, int]) -> Sequence[str]:
    counts = sorted(packages.items(), key=lambda one: (one[0] == "shoal", -one[1], one[0]))
    noun = " frame" if counts and counts[0][1] == 1 else " frames"
    words = [f"{count}{noun * (at == 0)} in {name}" for at, (name, count) in enumerate(counts)]
    return [f"… {', '.join(words)}"] if words else []
