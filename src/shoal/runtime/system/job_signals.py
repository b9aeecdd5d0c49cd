"""Signals that are for a whole job."""

from __future__ import annotations

import signal


def ignore_job_signals() -> None:
    """Ignore signals that ask a whole job to end: the program may save its work, and needs this
    process until then.

    A terminal sends SIGINT, a scheduler SIGTERM (or a configured signal) to the whole step.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
