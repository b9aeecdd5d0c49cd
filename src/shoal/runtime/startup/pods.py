"""The pods of a Kubernetes Job or JobSet, by their variables and names, without its API.

Kubernetes sets JOB_COMPLETION_INDEX in each pod of an indexed Job, and names it `<job>-<index>`.
It does not set their number, so the manifest does, in SHOAL_NUM_PROCESSES. A JobSet names its
jobs `<set>-<name>-<job index>`; if several have one name, the manifest passes JOB_INDEX and
REPLICATED_JOB_REPLICAS to the pods from their annotations (JOBSET_NAME too, if its headless
service has that name and the pod's fully qualified name does not show it).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

OWN = "JOB_COMPLETION_INDEX"
INDEX = "index of the pod"  # in all jobs of its JobSet; stands in the environment like a variable
_JOB, _JOBS, _SET = "JOB_INDEX", "REPLICATED_JOB_REPLICAS", "JOBSET_NAME"

_Environment = Mapping[str, str]


def completing(index: str, count: str) -> Callable[[_Environment, list[str]], _Environment]:
    """Return a function that adds the pod's index to an environment with a count and no index."""

    def completed(env: _Environment, problems: list[str]) -> _Environment:
        if _text(env, index) or _text(env, count) in ("", "1") or not _text(env, OWN):
            return env  # with "1", each pod is process 0 of a job of its own
        return {**env, INDEX: _index(env, count, problems)}

    return completed


def address(env: _Environment, port: Callable[[str], int]) -> str | None:
    """Return the address of pod 0, by its name in the headless service; None: unknown."""
    own, job_index = _text(env, OWN), _text(env, _JOB)
    host = _text(env, "HOSTNAME") or socket.gethostname()
    if not own or not host.endswith(f"-{own}"):
        return None
    job = host.removesuffix(f"-{own}")
    if job_index and _text(env, _JOBS) not in ("", "1"):
        if not job.endswith(f"-{job_index}"):
            return None
        job = job.removesuffix(f"-{job_index}") + "-0"
    domain = _text(env, _SET) or socket.getfqdn(host).partition(".")[2]
    return f"{job}-0.{domain}:{port(f'pods of {job}')}" if domain else None


def _index(env: _Environment, count: str, problems: list[str]) -> str:
    """Return the index of the pod in all jobs; JOB_COMPLETION_INDEX after a problem."""
    texts = {name: _text(env, name) for name in (OWN, _JOB, _JOBS, count)}
    if not texts[_JOB] and not texts[_JOBS]:
        return texts[OWN]
    shown = ", ".join(f"{name}={value}" for name, value in texts.items() if value)
    if not texts[_JOB] or not texts[_JOBS]:
        lacking = _JOB if texts[_JOBS] else _JOBS
        if texts[_JOB] != "0" and texts[_JOBS] != "1":  # else it has no effect
            problems.append(f"{shown} without {lacking}: which of the JobSet's jobs is this?")
        return texts[OWN]
    if not all(value.isascii() and value.isdigit() for value in texts.values()):
        problems.append(f"{shown}: all of them must be whole numbers")
        return texts[OWN]
    own, job, jobs, pods = (int(value) for value in texts.values())
    if jobs < 1 or pods % jobs or job >= jobs or own >= pods // jobs:
        problems.append(
            f"{shown} contradict each other: {count} counts the pods of all {jobs} jobs, and "
            f"{OWN} those of one"
        )
        return texts[OWN]
    return str(job * (pods // jobs) + own)


def _text(env: _Environment, name: str) -> str:
    return env.get(name, "").strip()
