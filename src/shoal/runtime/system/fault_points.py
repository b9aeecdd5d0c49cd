"""Fault injection: named points at which a test may inject a kill, a pause, a delay.

`SHOAL_FAULTS` is a list of `POINT[@PROCESS][#TURN]:KIND[=VALUE]`, separated by semicolons:

    barrier.before_arrive@1:kill; initialize.after_hello@0:delay=2; saved@2#3:exit=3

`@1`: in process 1 only, else in all. `#3`: the third time the point is reached, else the first;
`#*`: each time. A fault that has happened is removed from the variable, so that neither this
process nor a child of it repeats it. Unset, a point costs one lookup in the environment.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from shoal.errors import nearest, raise_all

__all__ = ["KINDS", "POINTS", "Fault", "InjectedError", "parse", "reach", "text_of"]

VARIABLE = "SHOAL_FAULTS"

POINTS: Mapping[str, str] = {
    "initialize.before_hello": "the services run, nothing was sent to the coordinator",
    "initialize.after_hello": "all processes have joined, JAX's service was not contacted yet",
    "initialize.after_devices": "the devices are connected, the job has not begun",
    "barrier.before_arrive": "in barrier, before anything is sent",
    "barrier.after_arrive": "in barrier, after all arrived",
    "broadcast.before_arrive": "in broadcast, before anything is sent",
    "broadcast.after_arrive": "in broadcast, after all arrived; large values have yet to be sent",
    "allgather.before_arrive": "in allgather, before anything is sent",
    "allgather.after_arrive": "in allgather, after all arrived; large values have yet to be sent",
    "relayout.before_arrive": "in relayout between processes, before anything is sent",
    "relayout.after_arrive": "in relayout between processes, after all agreed, before data moves",
    "sync_devices.before_arrive": "in sync_devices, before anything is awaited",
    "sync_devices.after_arrive": (
        "in sync_devices, after all arrived, before the devices synchronize"
    ),
    "stream.before_chunk": "before a chunk of a large value moves, on each process",
    "stream.after_chunk": "after a chunk was sent on its way",
    "assert_same.before_arrive": "in assert_same, the values hashed, before anything is sent",
    "assert_same.after_arrive": "in assert_same, after all arrived; before a difference is located",
    "check_finite.before_arrive": "in check_finite, the values checked, before anything is sent",
    "check_finite.after_arrive": "in check_finite, after all arrived",
    "check_replicas.before_arrive": "in check_replicas, replicas hashed, before anything is sent",
    "check_replicas.after_arrive": (
        "in check_replicas, after all arrived; before a difference is located"
    ),
    "save.preflight": "in save, before anything is sent",
    "save.snapshot": "after all agreed to save, before values are copied",
    "save.open": "on the lead, before the attempt is begun on disk",
    "save.opened": "on the lead, after that, before the others are notified",
    "save.write": "before this process's data is written",
    "save.written": "after that, before its part is",
    "save.parted": "after its part is written, before the others are notified",
    "save.assemble": "on the process that commits, before it reads the parts",
    "save.indexed": "after the index is written, before COMMIT is",
    "save.link": "after COMMIT's content is durable under its other name, before it is linked",
    "save.committed": "after COMMIT is linked, before files that are no longer needed are removed",
    "save.tidied": "after that, before the others are notified",
    "save.announced": "on each process, after all know that it is committed",
    "retain.before": "on the lead, before old steps are deleted",
    "delete.marked": "after COMMIT was renamed to DELETING-…, before files are deleted",
    "delete.half": "after the first of them is deleted",
    "restore.before_arrive": "in restore, before anything is sent",
    "restore.read": "before this process reads data",
    "step.end": "at the end of the block of step, if nothing was raised in it",
}
KINDS: Mapping[str, str] = {
    "kill": "SIGKILL to this process",
    "stop": "SIGSTOP to this process",
    "raise": "an InjectedError",
    "exit": "sys.exit(VALUE), default 1",
    "delay": "VALUE seconds of sleep",
    "pause": "connect to the Unix socket VALUE, and wait for one byte",
}
_ENTRY = re.compile(r"([\w.-]+)(?:@(\d{1,9}))?(?:#(\d{1,9}|\*))?:([\w-]+)(?:=(.*))?")
_EVERY = 0
_SIMILAR = 0.8  # a program's own "train.end" is no misspelled "retain"
_READ_S = 0.05


class InjectedError(Exception):
    """Raised by the fault `raise`; outside shoal's exception tree, like an error of the program."""


class Fault(NamedTuple):
    """One fault to inject."""

    point: str
    process: int | None  # None: in every process
    turn: int  # the turn at which it happens, from 1; 0: each
    kind: str
    value: str = ""

    def __str__(self) -> str:
        where = "" if self.process is None else f"@{self.process}"
        turn = {_EVERY: "#*", 1: ""}.get(self.turn, f"#{self.turn}")
        return f"{self.point}{where}{turn}:{self.kind}" + (f"={self.value}" if self.value else "")


def reach(point: str, process: int | None = None) -> None:
    """Declare that this process reaches `point`; faults of SHOAL_FAULTS happen here.

    Args:
      point: its name; programs may have points of their own.
      process: the index of this process; None: SHOAL_PROCESS_ID.

    Raises:
      UsageError: SHOAL_FAULTS is malformed.
      InjectedError: by the fault `raise`.
    """
    text = os.environ.get(VARIABLE)
    if text:
        _reach(text, point, process)


def _reach(text: str, point: str, process: int | None) -> None:
    if process is None:
        own = os.environ.get("SHOAL_PROCESS_ID", "")
        process = int(own) if own.isdigit() else None
    left: list[Fault] = []
    due: list[Fault] = []
    for fault in parse(text):
        if fault.point != point or fault.process not in (None, process):
            left.append(fault)
        elif fault.turn > 1:
            left.append(fault._replace(turn=fault.turn - 1))
        else:
            due.append(fault)
            left += [fault] if fault.turn == _EVERY else []
    os.environ[VARIABLE] = text_of(tuple(left))
    for fault in due:
        _let_happen(fault, process)


@functools.lru_cache(maxsize=64)
def parse(text: str) -> tuple[Fault, ...]:
    """Parse a list of faults.

    Raises:
      UsageError: it is malformed, or names a point of shoal that does not exist. All offenders.
    """
    faults = []
    problems: list[str] = []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            problems.append(f"{entry!r} is not POINT[@PROCESS][#TURN]:KIND[=VALUE]")
            continue
        point, process, turn, kind, value = match.groups(default="")
        problems += [f"{entry!r}: {problem}" for problem in _wrong(point, turn, kind, value)]
        turn_number = _EVERY if turn == "*" else int(turn or 1)
        faults.append(
            Fault(
                point,
                process=int(process) if process else None,
                turn=turn_number,
                kind=kind,
                value=value,
            )
        )
    raise_all(VARIABLE, problems)
    return tuple(faults)


def text_of(faults: tuple[Fault, ...]) -> str:
    """Return faults as the text that `parse` reads."""
    return "; ".join(map(str, faults))


def _wrong(point: str, turn: str, kind: str, value: str) -> list[str]:
    from difflib import get_close_matches

    problems = []
    family, _, name = point.partition(".")
    families = {known.split(".")[0] for known in POINTS}
    near = get_close_matches(family, families, cutoff=_SIMILAR) if name else []
    if point not in POINTS and (family in families or near):
        problems.append(f"shoal has no point {point!r}{nearest(point, POINTS)}")
    if turn.isdigit() and int(turn) == 0:
        problems.append("turns are counted from 1; #* means each")
    if kind not in KINDS:
        problems.append(f"{kind!r} is not one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    elif kind in ("kill", "stop", "raise") and value:
        problems.append(f"{kind} takes no value")
    elif kind == "exit" and not ((value.isdigit() and int(value) < 256) or not value):
        problems.append("exit takes a code from 0 to 255")
    elif kind == "delay" and not _is_duration(value):
        problems.append("delay takes a positive number of seconds")
    elif kind == "pause" and not value:
        problems.append("pause takes the path of a socket; shoal.testing's Cluster fills it in")
    return problems


def _is_duration(value: str) -> bool:
    with contextlib.suppress(ValueError):
        return 0 < float(value) < math.inf
    return False


def _let_happen(fault: Fault, process: int | None) -> None:
    if fault.kind in ("kill", "stop"):
        signal_number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        os.kill(os.getpid(), signal_number)
    elif fault.kind == "raise":
        raise InjectedError(f"a fault was injected at {fault.point!r}")
    elif fault.kind == "exit":
        sys.exit(int(fault.value or 1))
    elif fault.kind == "delay":
        time.sleep(float(fault.value))
    else:
        _pause(fault, process)


def _pause(fault: Fault, process: int | None) -> None:
    """Notify the listener that this process is here; continue when it answers, or when it is gone.

    The reads let other threads run, so that a paused process gives heartbeats. Each is short: a
    signal just before a read, or to another thread, does not end it, and Python runs the handler
    only between two of them.
    """
    with socket.socket(socket.AF_UNIX) as bench:
        bench.connect(fault.value)
        record = {"point": fault.point, "process": process, "pid": os.getpid()}
        bench.sendall(json.dumps(record).encode() + b"\n")
        bench.settimeout(_READ_S)
        with contextlib.suppress(ConnectionError):
            while True:
                with contextlib.suppress(TimeoutError):
                    bench.recv(1)
                    return
