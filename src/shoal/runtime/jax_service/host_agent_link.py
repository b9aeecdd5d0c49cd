"""Start the host agent of each host, and publish its proxy's address to the host's processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping

from shoal.errors import InitializeError
from shoal.runtime.client.over_tcp import TcpJobClient
from shoal.runtime.rules.point import Fingerprint, Point
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.child_process import Spawned
from shoal.runtime.system.service_commands import job_argument

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # the first one counts for gRPC
_LOCAL_INDICES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def is_likely_leader(process: int, environ: Mapping[str, str]) -> bool:
    """Guess whether this process is the lowest of its host; the coordinator decides later."""
    return process == 0 or any(environ.get(name) == "0" for name in _LOCAL_INDICES)


def without_proxy(host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which JAX's client connects to `host` without a proxy.

    gRPC uses a web proxy even for the loopback, unless one of three variables names the host; the
    first of them that is set counts.
    """
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
    spared = next((environ[name] for name in names if environ.get(name)), "")
    return {"no_grpc_proxy": ",".join(filter(None, (spared, host)))}


class HostAgentError(OSError):
    """The host agent cannot be started, cannot reach JAX's service, or is late."""


class HostAgent:
    """The host agent of this host, as seen by the process that starts it.

    It may be started before it is known which process is to start it, so as to be ready in time.
    """

    def __init__(self, job: str) -> None:
        """Prepare it for the job of this name."""
        self._job = job
        self._spawned: Spawned | None = None

    def start_early(self) -> None:
        """Start it if possible. A failure is reported when the host agent is needed."""
        with contextlib.suppress(HostAgentError):
            self._spawned = self._spawn()

    def begin(self, joined: TcpJobClient, token: str, jax_service: str, limit: float) -> str:
        """Send its orders; return the address of its proxy.

        Raises:
          HostAgentError: it cannot be started, cannot reach JAX's service, or is late.
          ProcessLostError, PeerFailedError: a process is gone meanwhile.
        """
        welcome = joined.welcome
        reports = {
            "coordinator": joined.address,
            "process": joined.process,
            "incarnation": welcome.incarnation,
            "heartbeat_s": None if welcome.heartbeat_s == math.inf else welcome.heartbeat_s,
            # A process that does not know its host keeps only itself, with nothing to report.
            "keeps": dict(joined.keeps) or {joined.process: os.getpid()},
            "reports": bool(joined.keeps),
        }
        # The host agent waits for a service that has died meanwhile; this process need not.
        return self._begin(reports, token, jax_service, limit, joined.check)

    def begin_proxy(self, token: str, jax_service: str, limit: float) -> str:
        """Send it the orders to be no more than the proxy of this process; return its address.

        Raises:
          HostAgentError: it cannot be started, cannot reach JAX's service, or is late.
        """
        own = {"keeps": {0: os.getpid()}, "reports": False, "heartbeat_s": None}
        return self._begin(own, token, jax_service, limit)

    def _begin(
        self,
        about: Mapping[str, object],
        token: str,
        jax_service: str,
        limit: float,
        check: Callable[[], None] = lambda: None,
    ) -> str:
        spawned, self._spawned = self._spawned or self._spawn(), None
        left_s = max(0.001, limit - time.monotonic())
        timeout_s = None if left_s == math.inf else left_s
        way = {"token": token, "jax_service": jax_service, "timeout_s": timeout_s}
        with contextlib.suppress(BrokenPipeError):
            spawned.stdin.write(json.dumps({**about, **way}).encode() + b"\n")
            spawned.stdin.close()
        line = spawned.first_line(left_s + 1.0, check=check)
        if not line:
            raise HostAgentError(spawned.last_words())
        spawned.detach()
        return str(json.loads(line)["address"])

    def _spawn(self) -> Spawned:
        try:
            return Spawned("shoal.runtime.jax_service.host_agent", job_argument(self._job))
        except OSError as error:
            raise HostAgentError(*error.args) from None

    def dismiss(self) -> None:
        """Dismiss a host agent that is not needed: it ends by itself."""
        if self._spawned is not None:
            self._spawned.stdin.close()
            self._spawned.detach()
            self._spawned = None


def find_host_agent(
    host_agent: HostAgent,
    joined: TcpJobClient,
    token: str,
    jax_service: str,
    limit: float,
    *,
    has_tls: bool,
) -> str:
    """Return the address of this host's proxy; the leader of the host starts the host agent.

    All processes of the job call it.

    Raises:
      InitializeError: on all: a host agent cannot be started, or cannot reach JAX's service.
    """
    outcome = {}
    if joined.leader == joined.process:
        try:
            outcome["address"] = host_agent.begin(joined, token, jax_service, limit)
        except HostAgentError as error:
            outcome["trouble"] = str(error)
    security = "mutual TLS" if has_tls else "no mutual TLS"
    fingerprint = Fingerprint("", "", f"JAX's service by {security}")
    point = Point("initialize", operation="initialize", site=callsite(), fingerprint=fingerprint)
    payload = json.dumps(outcome).encode() if outcome else b""
    answers = joined.arrive(point, payload, timeout_s=max(0.001, limit - time.monotonic()))
    heard = {process: json.loads(answer) for process, answer in answers.items() if answer}
    problems = [
        f"process {process} ({joined.hosts[process]}) cannot start the agent of its host, through "
        f"which JAX's service at {jax_service} is reached: {answer['trouble']}"
        for process, answer in heard.items()
        if "trouble" in answer
    ]
    if problems:
        raise InitializeError("; ".join(problems))
    return str(heard[joined.leader]["address"])
