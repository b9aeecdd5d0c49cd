"""The services of a job without a launcher: its coordinator and JAX's service.

Process 0 starts them as separate processes, in a new session, so that neither Ctrl-C nor the death
of process 0 ends them. They end by themselves:

    process 0 ──starts──▶ services (JAX's service) ──starts──▶ coordinator, until it is empty

The coordinator sees every member's connection close, even if all are killed, and ends; its parent
waits for that. Until all have joined, process 0 holds a leash, a pipe: if it dies or gives up
before, both end soon, and the address is free again. JAX's service goes last, because its clients
may abort when it goes first: if the coordinator dies, JAX's service stays until the members had
time to report that in Python. The coordinator monitors JAX's service, and survives it.

What ends a process may end all that it has started: a container ends with its first process, and
Slurm ends what the last task of a host leaves. So process 0 of a job on several hosts, or one that
is the first of its container, stays until the services have ended.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from shoal import settings
from shoal.errors import InitializeError
from shoal.runtime.jax_service.service_link import ServiceLink
from shoal.runtime.system.child_process import Spawned
from shoal.runtime.system.service_commands import (
    COORDINATOR,
    allow_child_ends,
    ignore_job_signals,
    service_arguments,
    show_part,
)
from shoal.runtime.wire.frames import address_text

_LINGER_MAX_S = 600.0
_RETIRING_S, _REFUSING_S = 3.0, 10.0
_LOOK_S = 0.01


class ServiceAddresses(NamedTuple):
    """The running services, and their addresses."""

    leash: IO[bytes]  # see `release` and `retire`
    address: str  # of the coordinator
    jax_service: str  # empty if the job has one already
    pid: int


def start(
    num_processes: int,
    *,
    bind: str,
    port: int,
    token: str,
    timeout_s: float,
    job: str,
    jax_service: bool = True,
    refusal: str = "",
    lacks_token: bool = False,
    variables: Mapping[str, str] | None = None,
) -> ServiceAddresses:
    """Start the services of a job; they end soon unless released.

    Args:
      refusal: why no process can join, which the coordinator answers; "": they can.
      lacks_token: whether that is for want of a token.
      variables: of the environment of the services.

    Raises:
      InitializeError: they fail to start, for example because the port is taken.
    """
    spawned = Spawned(
        "shoal.runtime.startup.services",
        *service_arguments(num_processes, bind, port, job=job),
        *("--idle-s", str(timeout_s)),
        *(() if jax_service else ("--no-jax-service",)),
        *(("--refusal", refusal) if refusal else ()),
        *(("--lacks-token",) if lacks_token else ()),
        env={**(variables or {}), "SHOAL_TOKEN": token},
    )
    line = spawned.first_line(timeout_s)
    if not line:
        where, reason = address_text(bind, port), spawned.last_words()
        hint = "the address must belong to this host, and its port must be free"
        if settings.text("SHOAL_COORDINATOR") == where:
            hint = "the launcher has started it (SHOAL_COORDINATOR): write shoal.initialize()"
        raise InitializeError(
            f"process 0 cannot start the coordinator at {where}: {reason}\n{hint}"
        )
    spawned.detach()
    return ServiceAddresses(spawned.stdin, **json.loads(line), pid=spawned.pid)


def release(services: ServiceAddresses, *, outlasts: bool) -> None:
    """Release the services of a job that has begun: they end after its last member.

    Args:
      outlasts: whether this process stays until they have ended, because they would end with it.
    """
    if outlasts:  # the exit guard's handler, registered later, is called before
        atexit.register(_outlast, services.pid, os.getpid())
    with contextlib.suppress(BrokenPipeError):  # they are gone, as their connections show
        services.leash.write(b".")
    services.leash.close()


def _outlast(services_pid: int, own_pid: int) -> None:
    """Wait until the services of this process's job have ended, after it has left the job."""
    if os.getpid() != own_pid:
        return  # a fork
    warn_at = time.monotonic() + settings.seconds("SHOAL_WARN_AFTER_S")
    with contextlib.suppress(ChildProcessError, KeyboardInterrupt):
        while not os.waitpid(services_pid, os.WNOHANG)[0]:
            if time.monotonic() >= warn_at:
                activity = (
                    "has ended its program, and waits for the others, whose services it started"
                )
                print(f"shoal: process 0 {activity}", file=sys.stderr, flush=True)
                warn_at = math.inf
            time.sleep(_LOOK_S)


def retire(services: ServiceAddresses) -> None:
    """End the services of a job that never began, soon, so that its port is free again."""
    services.leash.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run JAX's service, and a coordinator beside it, until the job's members are gone."""
    options = _parse(arguments)
    show_part("shoal-services")
    ignore_job_signals()  # inherited by the coordinator
    allow_child_ends()
    coordinator = Spawned(
        COORDINATOR,
        *service_arguments(options.processes, options.bind, options.port, job=options.job),
        *("--until-empty", "--until-stdin-closes", "--idle-s", str(options.idle_s)),
        *("--refusal", options.refusal),
        *(("--lacks-token",) if options.lacks_token else ()),
    )
    service = None
    if not options.no_jax_service:
        from shoal.runtime.jax_service.jax_runtime import JaxService

        service = JaxService()  # while the coordinator starts
    line = coordinator.first_line(options.idle_s)
    if not line:
        print(coordinator.last_words(), file=sys.stderr)
        return 1
    addresses = json.loads(line) | {"jax_service": ""}
    token = os.environ.get("SHOAL_TOKEN", "")
    link = ServiceLink("JAX's service", token)
    if service is not None:
        # Only now: "any free port" might have been the coordinator's.
        addresses["jax_service"] = service.start(options.processes, token, host=options.bind)
        link.open(addresses["address"])  # before any process joins, which must learn of its end
    with contextlib.suppress(BrokenPipeError):  # process 0 is gone; others may have joined
        print(json.dumps(addresses), flush=True)
    # Process 0 is the first to know that its job cannot start; the others have yet to arrive.
    _stay(coordinator, link, _REFUSING_S if options.refusal else _RETIRING_S)
    link.close()
    if service is not None:
        service.close()
    return 0


def _stay(coordinator: Spawned, link: ServiceLink, stands_s: float) -> None:
    """Wait on the leash until the job has begun, then for the end of the coordinator."""
    leash, ended = sys.stdin.fileno(), coordinator.stdout.fileno()
    if ended not in link.wait(leash, ended):
        if not os.read(leash, 1):  # the leash ended
            _retire(coordinator, stands_s)
            return
        link.wait(ended)
    if coordinator.wait() != 0:
        time.sleep(min(settings.seconds("SHOAL_HANG_TIMEOUT_S"), _LINGER_MAX_S))


def _retire(place: Spawned, stands_s: float) -> None:
    """End after a short delay, in which late processes still learn why there is no job."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        place.wait(stands_s)
    place.stdin.close()
    place.wait()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shoal.runtime.startup.services")
    parser.add_argument("--job", default="")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--bind", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    parser.add_argument("--no-jax-service", action="store_true")
    parser.add_argument("--refusal", default="")
    parser.add_argument("--lacks-token", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
