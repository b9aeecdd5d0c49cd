"""The variables that start a job of TensorFlow's DTensor.

DTENSOR_JOBS lists host:port of every process; the processes meet at its first entry.
DTENSOR_CLIENT_ID is the index of this process's entry, 0 by default. DTENSOR_NUM_CLIENTS, of early
versions, is the number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping

INDEX = "DTENSOR_CLIENT_ID"
COUNT = "entries of DTENSOR_JOBS"  # named like a variable
_JOBS, _NUMBER = "DTENSOR_JOBS", "DTENSOR_NUM_CLIENTS"


def jobs_of(listed: str) -> list[str]:
    """Return the entries of DTENSOR_JOBS, without surrounding blanks; [] if there are none.

    >>> jobs_of("a:1, b:1"), jobs_of("")
    (['a:1', 'b:1'], [])
    """
    return [entry.strip() for entry in listed.split(",")] if listed.strip() else []


def completed(env: Mapping[str, str], problems: list[str]) -> Mapping[str, str]:
    """Return the environment, with index and count added if this is a process of DTensor."""
    jobs = jobs_of(env.get(_JOBS, ""))
    index, number = (env.get(name, "").strip() for name in (INDEX, _NUMBER))
    if jobs:
        if "" in jobs:
            problems.append(f"{_JOBS}={env[_JOBS]!r} has an empty entry")
        if number and number != str(len(jobs)):
            problems.append(f"{_NUMBER}={number} contradicts the {len(jobs)} {COUNT}")
        return {**env, INDEX: index or "0", COUNT: str(len(jobs))}
    shown = [
        f"{name}={value}"
        for name, value, alone in ((INDEX, index, "0"), (_NUMBER, number, "1"))
        if value not in ("", alone)
    ]
    if shown:
        problems.append(
            f"{' and '.join(shown)} without {_JOBS}: in multi-client mode it lists host:port of "
            "every process"
        )
    return {name: value for name, value in env.items() if name != INDEX}


def address(env: Mapping[str, str]) -> str | None:
    """Return the meeting address: the entry of process 0, or None if it is not an address."""
    first = next(iter(jobs_of(env.get(_JOBS, ""))), None)
    return None if first is None or first.startswith("/bns/") else first
