"""The command lines of the two services of a job, which a launcher, a command or process 0 starts.

Each is a program of its own. It prints one line, {"address": "HOST:PORT"}, once it listens; with
`--until-stdin-closes` it ends when its standard input is closed, so never outlives its parent.
"""

from __future__ import annotations

import json

MEETING_PLACE = "shoal.runtime.server.meeting_place"  # modules, for `python -P -m`
JAX_SERVICE = "shoal.runtime.jax_service.jax_runtime"


def service_arguments(num_processes: int, bind: str = "", port: int = 0) -> tuple[str, ...]:
    """Return the arguments that both take.

    Args:
      bind: the address to listen at; "": the loopback.
      port: 0: any free one.

    >>> service_arguments(4, "0.0.0.0", 8476)
    ('--processes', '4', '--port', '8476', '--bind', '0.0.0.0')
    """
    where = ("--bind", bind) if bind else ()
    return ("--processes", str(num_processes), "--port", str(port), *where)


def introduction(meeting_place: str) -> bytes:
    """Return the line that connects JAX's service to the meeting place, which monitors it.

    >>> introduction("a:8476")
    b'{"meeting_place": "a:8476"}\\n'
    """
    return json.dumps({"meeting_place": meeting_place}).encode() + b"\n"
