"""The failure of a process as the others know it: from what it has reported to them.

The report is a headline and, of an exception, the traceback as Python prints it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter

from shoal.runtime.failures.facts import Cause, ErrorFacts, ProcessSet, StackFrame
from shoal.runtime.failures.shortening import capital
from shoal.runtime.failures.stack_text import package_of
from shoal.runtime.system.callsite import relative_to_root
from shoal.runtime.system.failure_words import headline_of, is_exit, raised_at

_FRAME = re.compile(r' *(?:\| *)?File "(.+)", line (\d{1,9}), in (.+)')
_BEGIN = "Traceback (most recent call last):"
_EXIT_CODE = re.compile(r"exited with code (\d{1,3})\b")


def as_reported(words: str) -> Cause:
    """Return the failure of a process, without the process, from its words.

    >>> as_reported("ValueError: no data (train.py:31 (main))").error.message
    'no data'
    """
    headline = headline_of(words)
    kind, place = raised_at(headline)
    if not kind:
        if is_exit(headline):
            code = _EXIT_CODE.match(headline)
            said = f"{capital(headline)}."
            number = int(code[1]) if code else 1
            return Cause(processes=ProcessSet(), kind="exit", exit_code=number, words=(said,))
        return Cause(processes=ProcessSet(), kind="exit", words=(f"It had reported: {headline}",))
    module, _, name = kind.rpartition(".")
    message = headline.removeprefix(kind).removeprefix(": ").rpartition(f" ({place} (")[0]
    frames, left_out = _frames_of(words)
    if not frames:
        file, _, line = place.rpartition(":")
        frames = (StackFrame(file=file, line=int(line), function=""),)
    return Cause(
        processes=ProcessSet(),
        kind="exception",
        exit_code=None if module == "shoal.errors" else 1,
        error=ErrorFacts(type=name, module=module or "builtins", message=message),
        frames=frames,
        left_out=left_out,
    )


def _frames_of(words: str) -> tuple[tuple[StackFrame, ...], dict[str, int]]:
    """Return the program's frames of the last traceback in a text, the outermost first, and how
    many of each package are below them."""
    _, found, trace = words.rpartition(f"\n{_BEGIN}\n")
    lines = trace.splitlines() if found else []
    frames: list[StackFrame] = []
    below: Counter[str] = Counter()
    for line, after in itertools.pairwise([*lines, ""]):
        at = _FRAME.fullmatch(line)
        if at is None:
            if line[:1] not in (" ", "\t"):
                break  # the exception itself
            continue
        file, number, function = at[1], int(at[2]), at[3]
        if package := package_of(file):
            below[package] += 1
            continue
        below.clear()
        source = "" if _FRAME.fullmatch(after) else after.strip()
        frames.append(
            StackFrame(file=relative_to_root(file), line=number, function=function, source=source)
        )
    return (tuple(frames), dict(below)) if frames else ((), {})
