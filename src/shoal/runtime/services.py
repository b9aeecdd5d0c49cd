"""What a job without a launcher needs somebody to run: its meeting place and JAX's service.

Process 0 starts them in processes of their own, in a new session, so that neither Ctrl-C nor the
death of process 0 ends them. They end by themselves:

    process 0 ──starts──▶ services (JAX's service) ──starts──▶ meeting place, until it is empty

The meeting place sees every member's connection close, also when all are killed, and ends; its
parent waits for that. Until all have come, process 0 holds a leash, a pipe: should it die or give
up before, both end soon, and the address is free again. JAX's service goes last, because its
clients abort when it goes first: if the meeting place should die, JAX's service stays until the
members had time to say so in Python.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, NamedTuple, cast

from shoal import settings
from shoal.errors import InitializeError
from shoal.runtime.frames import address_text

__all__ = ["Services", "main", "release", "retire", "start"]

_LINGER_MAX_S = 600.0
_RETIRING_S = 3.0


class Services(NamedTuple):
    """What runs, and where it listens."""

    leash: IO[bytes]  # see `release` and `retire`
    address: str  # of the meeting place
    jax_service: str  # empty where the job has one already


def start(
    num_processes: int,
    *,
    bind: str,
    port: int,
    token: str,
    timeout_s: float,
    jax_service: bool = True,
) -> Services:
    """Start the services of a job; they end soon unless they are released.

    Raises:
      InitializeError: they do not start, for example because the port is taken.
    """
    command = _command("shoal.runtime.services", num_processes, bind, port, timeout_s)
    # A file and no pipe: later words must not block it, nor hold the caller's own stderr open.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*command, *(() if jax_service else ("--no-jax-service",))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env={**os.environ, "SHOAL_TOKEN": token},
            start_new_session=True,
        )
        line, leash = _first_line(process, timeout_s), process.stdin
        if not line or leash is None:
            process.kill()
            process.wait()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            late = f"it did not start within {timeout_s:.1f} s"
            raise InitializeError(
                f"process 0 cannot start the meeting place at {address_text(bind, port)}: "
                f"{said[-1] if said else late}\n"
                "the address must be one of this host's own, with a free port"
            )
    process.returncode = 0  # nobody waits for it: without this Popen warns when it is collected
    return Services(leash, **json.loads(line))


def release(services: Services) -> None:
    """Leave the services of a job that has begun on their own: they end after its last member."""
    with contextlib.suppress(BrokenPipeError):  # they are gone: known from their connections
        services.leash.write(b".")
    services.leash.close()


def retire(services: Services) -> None:
    """Let the services of a job that never began end soon: its port must be free again."""
    services.leash.close()


def _command(
    module: str, num_processes: int, bind: str, port: int, idle_s: float
) -> tuple[str, ...]:
    """-P: the directory of the user's script must not shadow what the services import."""
    numbers = ("--processes", str(num_processes), "--port", str(port), "--idle-s", str(idle_s))
    return (sys.executable, "-P", "-m", module, "--bind", bind, *numbers)


def _first_line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Return the first line that a process prints, empty if it ends or is late."""
    stream = cast("IO[bytes]", process.stdout)
    line = b""
    deadline = time.monotonic() + timeout_s
    readable = select.poll()  # select itself takes no descriptor above 1023
    readable.register(stream, select.POLLIN)
    while not line.endswith(b"\n"):
        ready = readable.poll(max(0.0, deadline - time.monotonic()) * 1000)
        part = os.read(stream.fileno(), 4096) if ready else b""
        if not part:
            line = b""
            break
        line += part
    stream.close()
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run JAX's service, and a meeting place beside it, until the job's members are gone."""
    options = _parse(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    command = _command(
        "shoal.runtime.meeting_place",
        options.processes,
        options.bind,
        options.port,
        options.idle_s,
    )
    place = subprocess.Popen(
        [*command, "--until-empty", "--until-stdin-closes"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    service = None
    if not options.no_jax_service:
        from shoal.runtime.jax_runtime import JaxService  # while the other one starts

        service = JaxService(options.processes, host=options.bind)
    line = _first_line(place, options.idle_s)
    if not line:
        place.kill()
        return place.wait() or 1
    told = json.loads(line) | {"jax_service": service.address if service else ""}
    with contextlib.suppress(BrokenPipeError):  # process 0 is gone; others may be there
        print(json.dumps(told), flush=True)
    if not sys.stdin.buffer.read(1):  # the leash ended
        _retire(place)
    elif place.wait() != 0:
        time.sleep(min(settings.seconds("SHOAL_ABORT_AFTER_S"), _LINGER_MAX_S))
    if service is not None:
        service.close()
    return 0


def _retire(place: subprocess.Popen[bytes]) -> None:
    """Those who are about to come have a moment to hear why there will be no job."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        place.wait(_RETIRING_S)
    if place.stdin is not None:
        place.stdin.close()
    place.wait()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.runtime.services")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    parser.add_argument("--no-jax-service", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
