"""The variables by which TensorFlow's DTensor starts a job.

DTENSOR_JOBS lists host:port of every process, and its first entry is where they meet.
DTENSOR_CLIENT_ID says which entry this process is, 0 by default. DTENSOR_NUM_CLIENTS, of early
versions, says how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping

INDEX = "DTENSOR_CLIENT_ID"
COUNT = "entries of DTENSOR_JOBS"  # as if it were a variable of its own
_JOBS, _NUMBER = "DTENSOR_JOBS", "DTENSOR_NUM_CLIENTS"


def jobs_of(listed: str) -> list[str]:
    """Return the entries of DTENSOR_JOBS, without the blanks around them; of none, [].

    >>> jobs_of("a:1, b:1"), jobs_of("")
    (['a:1', 'b:1'], [])
    """
    return [entry.strip() for entry in listed.split(",")] if listed.strip() else []


def completed(env: Mapping[str, str], offences: list[str]) -> Mapping[str, str]:
    """Return the environment, with index and count if this is one of DTensor's processes."""
    jobs = jobs_of(env.get(_JOBS, ""))
    index, number = (env.get(name, "").strip() for name in (INDEX, _NUMBER))
    if jobs:
        if "" in jobs:
            offences.append(f"{_JOBS}={env[_JOBS]!r} has an empty entry")
        if number and number != str(len(jobs)):
            offences.append(f"{_NUMBER}={number} contradicts the {len(jobs)} {COUNT}")
        return {**env, INDEX: index or "0", COUNT: str(len(jobs))}
    shown = [
        f"{name}={value}"
        for name, value, alone in ((INDEX, index, "0"), (_NUMBER, number, "1"))
        if value not in ("", alone)
    ]
    if shown:
        offences.append(
            f"{' and '.join(shown)} without {_JOBS}: in multi-client mode it lists host:port of "
            "every process"
        )
    return {name: value for name, value in env.items() if name != INDEX}


def address(env: Mapping[str, str]) -> str | None:
    """Return where the processes meet: the entry of process 0, unless it is no address."""
    first = next(iter(jobs_of(env.get(_JOBS, ""))), None)
    return None if first is None or first.startswith("/bns/") else first
