"""Signals that were ignored when a command began, and stay so.

`nohup` asks with an ignored SIGHUP that the end of the terminal is survived; a shell that runs a
script starts what `&` follows with SIGINT ignored, so that Ctrl-C ends the script alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return those of the signals that are not ignored."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def ignored_words() -> str:
    """Return what does not end this command, and what does; "" if SIGINT does."""
    if signal.SIGINT in heeded([signal.SIGINT]):
        return ""
    ends = signal.SIGTERM if heeded([signal.SIGTERM]) else signal.SIGKILL
    kill = "kill" if ends is signal.SIGTERM else f"kill -{ends.name.removeprefix('SIG')}"
    return (
        "SIGINT is ignored, as for what a script starts with `&`: "
        f"`{kill} {os.getpid()}` ({ends.name}) ends the job"
    )
