"""Signals that were ignored when a command began, and stay ignored.

`nohup` ignores SIGHUP so that the command survives its terminal; a shell that runs a script starts
commands followed by `&` with SIGINT ignored, so that Ctrl-C ends only the script.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable


def not_ignored(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that are not ignored."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def ignored_sigint_line() -> str:
    """Return a line about an ignored SIGINT, and how to end this command; "" if not ignored."""
    if signal.SIGINT in not_ignored([signal.SIGINT]):
        return ""
    ends = signal.SIGTERM if not_ignored([signal.SIGTERM]) else signal.SIGKILL
    kill = "kill" if ends is signal.SIGTERM else f"kill -{ends.name.removeprefix('SIG')}"
    return (
        "SIGINT is ignored, as for a background command of a script: "
        f"`{kill} {os.getpid()}` ({ends.name}) ends the job"
    )
