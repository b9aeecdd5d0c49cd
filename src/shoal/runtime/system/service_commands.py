"""The command lines of the two services of a job, which a launcher, a command or process 0 starts.

Each is a program of its own. It prints one line, {"address": "HOST:PORT"}, once it listens; with
`--until-stdin-closes` it ends when its standard input is closed, so never outlives its parent.

As all of shoal's own processes they show in `ps` which job they belong to, by an argument, and
which part of it they are, by the name of the process. Python itself is not renamed: it finds its
virtual environment by its first argument.
"""

from __future__ import annotations

import contextlib
import json

MEETING_PLACE = "shoal.runtime.server.meeting_place"  # modules, for `python -P -m`
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


def job_argument(job: str) -> str:
    """Return the argument by which `ps` shows the job of a process; it has no other effect."""
    return f"--job={job}"


def show_part(part: str) -> None:
    """Name this process, as `ps -e` and `top` show it on Linux; at most 15 characters."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write(part)


def introduction(meeting_place: str) -> bytes:
    """Return the line that connects JAX's service to the meeting place, which monitors it.

    >>> introduction("a:8476")
    b'{"meeting_place": "a:8476"}\\n'
    """
    return json.dumps({"meeting_place": meeting_place}).encode() + b"\n"
