"""The services of a job as processes: their command lines, what they inherit, their signals.

Each is a program of its own. It prints one line, {"address": "HOST:PORT"}, once it listens; with
`--until-stdin-closes` it ends when its standard input is closed, so never outlives its parent.

As all of shoal's own processes they show in `ps` which job they belong to, by an argument, and
which part of it they are, by the name of the process. Python itself is not renamed: it finds its
virtual environment by its first argument.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterable

COORDINATOR = "shoal.runtime.server.coordinator"  # modules, for `python -P -m`
JAX_SERVICE = "shoal.runtime.jax_service.jax_runtime"


def service_arguments(
    num_processes: int, bind: str = "", port: int = 0, *, job: str = ""
) -> tuple[str, ...]:
    """Return the arguments that both take.

    Args:
      bind: the address to listen at; "": the loopback.
      port: 0: any free one.
      job: see `job_argument`.

    >>> service_arguments(4, "0.0.0.0", 8476, job="a")
    ('--job=a', '--processes', '4', '--port', '8476', '--bind', '0.0.0.0')
    """
    where = ("--bind", bind) if bind else ()
    return (job_argument(job), "--processes", str(num_processes), "--port", str(port), *where)


WAITS = "--waits"  # for a line with the token, before it listens


def token_line(token: str) -> bytes:
    """Return the line that lets a service with `WAITS` listen."""
    return json.dumps({"token": token}).encode() + b"\n"


def wait_for_token() -> None:
    """Take the token from that line; end this process if its standard input closes instead."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    os.environ["SHOAL_TOKEN"] = json.loads(line)["token"]


def job_argument(job: str) -> str:
    """Return the argument by which `ps` shows the job of a process; it has no other effect."""
    return f"--job={job}"


def show_part(part: str) -> None:
    """Name this process, as `ps -e` and `top` show it on Linux; at most 15 characters."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(part)


def show_command(*words: str) -> None:
    """Let `ps -ef` show these words as the command line of this process, on Linux.

    They are written over the old one (proc_pid_stat(5): arg_start, arg_end), so those that find no
    room there are left out.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open("/proc/self/stat", "rb") as file:
            start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
        text = b""
        for word in words:
            longer = text + word.encode() + b"\0"
            text = longer if len(longer) <= end - start else text
        if start and text:
            import ctypes

            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def introduction(coordinator: str) -> bytes:
    """Return the line that connects JAX's service to the coordinator, which monitors it.

    >>> introduction("a:8476")
    b'{"coordinator": "a:8476"}\\n'
    """
    return json.dumps({"coordinator": coordinator}).encode() + b"\n"


# ---- Signals that are for a whole job.


_OF_JOBS = (
    signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def ignore_job_signals() -> None:
    """Ignore signals that ask a whole job to end: the program may save its work, and needs this
    process until then.

    A terminal sends SIGINT or SIGQUIT, a scheduler SIGTERM (or a configured signal) to the whole
    step.
    """
    for number in _OF_JOBS:
        signal.signal(number, signal.SIG_IGN)


# ---- What a process inherits from its parent, and could not work with.
#
# Standard streams may be closed (`ssh host 'python train.py >&- 2>&- &'`): the next file or
# socket would get such a stream's number, and what native code prints. SIGCHLD may be ignored, so
# that the kernel drops the exit codes of children, or blocked, so that their end wakes no
# process.


def open_standard_streams() -> list[int]:
    """Open closed standard streams as /dev/null; return their numbers."""
    opened: list[int] = []
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            got = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if got != fd:  # another thread was faster
                os.close(got)
                continue
            os.set_inheritable(fd, True)
            opened.append(fd)
    return opened


def allow_child_ends() -> None:
    """Have the ends of children reported to this process, and to those that it starts."""
    if sys.platform == "win32":
        return
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


# ---- Signals that were ignored when a command began, and stay ignored.
#
# `nohup` ignores SIGHUP so that the command survives its terminal; a shell that runs a script
# starts commands followed by `&` with SIGINT ignored, so that Ctrl-C ends only the script.


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
