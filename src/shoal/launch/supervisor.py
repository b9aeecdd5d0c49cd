"""Two processes that watch each other, so that a job never outlives its launcher.

`launcher` is the process that the user started: it forwards signals and waits. `supervisor` is its
only child, in a session of its own: it starts and ends everything else. They are joined by one
pipe, which only the launcher can write: a byte is a signal to pass on, the end of the pipe means
that the launcher is dead (SIGKILL included) and everything must end. If the supervisor dies first,
the launcher inherits its children and ends them. Only if both are killed at the same instant do
processes remain. A signal to the supervisor counts as one to the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from shoal.launch.environment import job_name
from shoal.runtime.exit.first_failure import shell_code, signal_name
from shoal.runtime.system.process_status import adopt_orphans, kill_all
from shoal.runtime.system.service_commands import (
    job_argument,
    not_ignored,
    show_command,
    show_part,
)

# Batch systems announce the end of an allocation with SIGUSR1 or SIGUSR2.
FORWARDED = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
_PART = "shoal-supervise"
_LAST_RESORT = 3  # this many SIGINTs mean that the supervisor itself is stuck
_WITHIN_S = 5.0


def run_in_supervisor(job: Callable[[int], int]) -> int:
    """Run `job(orders_fd)` in a supervisor and return its exit code.

    Args:
      job: reads the numbers of forwarded signals from `orders_fd`, one byte each; at the end of the
        pipe it returns at once. Processes that it leaves behind are killed.
    """
    adopt_orphans()  # if the supervisor is killed; and what it imports, the supervisor has too
    orders_fd, lifeline_fd = os.pipe()
    before = _forward_signals(lifeline_fd)
    sys.stdout.flush()
    sys.stderr.flush()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(lifeline_fd)
        _run_supervisor(job, orders_fd)
    os.close(orders_fd)
    try:
        return _wait_for(supervisor)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(lifeline_fd)


def _run_supervisor(job: Callable[[int], int], orders_fd: int) -> None:
    """Run the job, end what it leaves behind, and always end this process."""
    code = 1
    try:
        # Own session: neither Ctrl-C nor a signal to the launcher's group reaches the supervisor,
        # and it may write to the terminal at any time. A handler, not SIG_IGN, which programs
        # inherit.
        os.setsid()
        show_part(_PART)
        show_command(_PART, job_argument(job_name()))
        for number in not_ignored(FORWARDED):
            signal.signal(number, _do_nothing)
        adopt_orphans()
        code = job(orders_fd)
    except BaseException:  # noqa: BLE001 - nothing may return into the launcher's stack
        traceback.print_exc()
    finally:
        kill_all(within_s=_WITHIN_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for(supervisor: int) -> int:
    """Wait until the supervisor ends; if it was killed, end its children."""
    while True:
        status = os.waitpid(supervisor, os.WUNTRACED)[1]
        if not os.WIFSTOPPED(status):
            break
        _say(
            f"the supervisor of the job (pid {supervisor}) is stopped by a signal, and with it all "
            f"output; `kill -CONT {supervisor}` resumes it"
        )
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    # Older children of this process (`sh -c 'daemon & exec shoal run …'`) share its session.
    kill_all(within_s=_WITHIN_S, beyond_session=os.getsid(0))
    _say(f"the supervisor was killed by {signal_name(-code)}; the job is ended")
    return shell_code(code)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(f"shoal run: {message}", file=sys.stderr, flush=True)


def _forward_signals(lifeline_fd: int) -> dict[int, Any]:
    """Write each forwarded signal to the lifeline; return the previous handlers.

    An ignored signal stays ignored.
    """
    interrupts = 0

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts >= _LAST_RESORT:
            kill_all(within_s=_WITHIN_S, beyond_session=os.getsid(0))
            os._exit(128 + number)
        with contextlib.suppress(BrokenPipeError):
            os.write(lifeline_fd, bytes([number]))

    return {number: signal.signal(number, forward) for number in not_ignored(FORWARDED)}


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal only has to wake this process, whose loop learns its number."""
