"""The cells of the fault matrix: what happens, to whom, where the others stand; and what must hold.

A cell runs one job of three processes. The bench lets the fault happen once everybody stands where
they should, and compares the times that the processes say with its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from faults import programs
from shoal.testing.cluster import Cluster
from shoal.testing.ended import Ended

LOST_AFTER_S, ABORT_AFTER_S = 2.0, 1.0
SETTINGS = {
    "SHOAL_HEARTBEAT_S": "0.4",
    "SHOAL_LOST_AFTER_S": str(LOST_AFTER_S),
    "SHOAL_HANG_TIMEOUT_S": str(ABORT_AFTER_S),
    "SHOAL_WARN_AFTER_S": "0.1",  # in the barrier the warning shows that a process waits
    "SHOAL_GRACE_S": "1",
}
PROCESSES = range(3)
PLACE, SERVICE = "the coordinator", "JAX's service"
NATIVE = ("collective", "stream")
AGREEMENTS = ("barrier", "broadcast", "allgather", "assert_same")
# Where the bench holds a process inside a call of shoal: all have agreed, one does not go on.
MIDSTS = {
    "chunks of broadcast": ("stream.before_chunk", "#4"),
    "chunks of allgather": ("stream.before_chunk", "#4"),
    "pieces of broadcast": ("stream.before_chunk", "#4"),  # through the memory of the host
    "difference": ("assert_same.after_arrive", ""),
}
# How soon the others must know.
BOUND_S = {
    "kill": 1.0, "stop": LOST_AFTER_S + 2.0, "cut": LOST_AFTER_S + 2.0, "raise": 2.0, "exit": 2.0,
}  # fmt: skip
NATIVE_S = ABORT_AFTER_S + 2.0  # and so much later is ended who hangs
FAILS = ("raise", "exit")
LOST, FAILED = 71, 72
_REASONS = {"raise": "has no more data", "exit": "exited with code 3"}
VICTIM_CODES = {"kill": -9, "raise": 1, "exit": 3, "stop": LOST, "cut": LOST}
_DEADLINE_S = 60.0
_LEFT_S = 20.0


class Cell(NamedTuple):
    """One job, and what happens in it."""

    devices: int
    services: str  # who runs them, as a `Cluster` takes it
    where: str
    fault: str
    victim: int | str

    def __str__(self) -> str:
        words = f"{self.where}-{self.fault}-{self.victim}-{self.devices}dev-{self.services}"
        return re.sub(r"[^\w-]+", "_", words)

    @property
    def is_native(self) -> bool:
        """Whether the others stand where no exception reaches them."""
        return self.where in NATIVE

    @property
    def point(self) -> str:
        """Where a process is held by the bench."""
        return MIDSTS.get(self.where, ("before", ""))[0]

    @property
    def is_held(self) -> bool:
        """Whether the process that keeps the others from going on is held by the bench."""
        if isinstance(self.victim, int):
            return self.where in (*AGREEMENTS, *MIDSTS, "collective") or self.fault in FAILS
        return self.where in (*MIDSTS, "collective")

    @property
    def is_in_memory(self) -> bool:
        """Whether values go through the host's memory, or over the devices as between hosts."""
        return self.where.startswith("pieces")

    @property
    def turn(self) -> str:
        """How often it has come there then."""
        return MIDSTS.get(self.where, ("", ""))[1]

    @property
    def named(self) -> int | str:
        """Who is lost or failed, as far as the survivors can know."""
        return PLACE if self.fault == "cut" and self.has_place else self.victim

    @property
    def has_place(self) -> bool:
        """Whether the coordinator is cut off with the victim: to it, the others are."""
        return self.victim == 0 and self.services == "process 0"

    @property
    def survivors(self) -> list[int]:
        """The processes that must learn of it."""
        return [p for p in PROCESSES if p != self.victim]


class Told(NamedTuple):
    """What came of a cell."""

    fault_at: float
    ended: Mapping[int, Ended]
    learned: Mapping[int, Mapping[str, Any]]  # what each process said of its exception
    left: tuple[str, ...]  # what still ran after it
    launcher: str = ""  # what it said


def run(cell: Cell, env: Mapping[str, str], start_method: str = "spawn") -> Told:
    """Run a cell."""
    is_process = isinstance(cell.victim, int)
    apart = cell.victim if isinstance(cell.victim, int) else PROCESSES[-1]
    bench = Cluster(
        len(PROCESSES),
        devices=cell.devices,
        services=cell.services,
        network=cell.fault == "cut",
        faults=f"{cell.point}@{apart}{cell.turn}:pause",
        env={**env, **SETTINGS, "SHOAL_SHARED_MEMORY": str(int(cell.is_in_memory))},
        start_method=start_method,
        deadline_s=_DEADLINE_S,
    )
    with bench:
        bench.start(programs.stand, cell.where, cell.fault, apart, is_process)
        for process in PROCESSES:
            _wait_until_it_stands(bench, cell, process, apart)
        at = time.monotonic()
        _strike(bench, cell)
        ended = _wait_for_the_end(bench, cell)
        left = _what_is_left(bench)
        launcher = bench.lines_of("the launcher") if cell.services == "launcher" else []
    said = [line for one in ended for line in one.out.splitlines()]
    own = [float(line.split()[2]) for line in said if line.startswith("fault ")]
    rows = {one.process: one for one in ended}
    learned = {process: _learned(one) for process, one in rows.items()}
    return Told(own[0] if own else at, rows, learned, left, "\n".join(launcher))


def _wait_until_it_stands(bench: Cluster, cell: Cell, process: int, apart: int) -> None:
    if process == apart and cell.is_held:
        bench.wait_for_pause(cell.point, process)
        return
    if cell.where in MIDSTS:  # who is held could not be there without the others
        return
    # From the process itself, or on the launcher's output.
    bench.wait_for(f"inside {process} ", "the launcher" if cell.services == "launcher" else process)


def _strike(bench: Cluster, cell: Cell) -> None:
    if cell.fault in ("kill", "stop"):
        getattr(bench, cell.fault)(cell.victim)
    if cell.fault == "cut":
        bench.cut(cell.victim)
    # With the coordinator on its side of the cut, the victim would pass the barrier where the
    # others wait: they have come to it. It stays where it is, in no call of shoal.
    passes = cell.has_place and cell.fault == "cut" and cell.where in AGREEMENTS
    if not isinstance(cell.victim, int):
        if cell.where in MIDSTS:  # without a service a call could still come to its end
            for process in PROCESSES[:-1]:
                bench.wait_for(f"learned {process} ", process)
            bench.release(cell.point)
    elif cell.where in MIDSTS and cell.fault in FAILS:
        os.kill(bench.pid(cell.victim), programs.FAIL)
    elif cell.fault not in ("kill", "stop") and not passes:
        bench.release(cell.point)


def _wait_for_the_end(bench: Cluster, cell: Cell) -> list[Ended]:
    """Wait until all have ended; who was frozen goes on once the others are gone."""
    if cell.fault == "stop" and cell.services != "launcher":
        bench.wait(only=cell.survivors)
        bench.cont(cell.victim)
        if isinstance(cell.victim, int):
            bench.release(cell.point)
    return bench.wait()


def _what_is_left(bench: Cluster) -> tuple[str, ...]:
    """Wait until all that the job started has ended too; return what does not."""
    give_up = time.monotonic() + _LEFT_S
    while pids := bench.pids():
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pids[0])
            ready, _, _ = select.select([handle], [], [], max(0.0, give_up - time.monotonic()))
            os.close(handle)
            if not ready:
                return tuple(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
    return ()


def _learned(one: Ended) -> Mapping[str, Any]:
    lines = [line for line in one.out.splitlines() if line.startswith(f"learned {one.process} ")]
    found: Mapping[str, Any] = json.loads(lines[0].split(" ", 2)[2]) if lines else {}
    return found


def problems(cell: Cell, told: Told) -> list[str]:
    """Return all that must hold in a cell and does not."""
    found = [f"left running: {words}" for words in told.left]
    if re.search(r"killed by SIG(?!KILL)", told.launcher):  # it alone knows the codes
        found.append(f"somebody was ended by a signal\n{told.launcher}")
    for process in cell.survivors:
        one, learned = told.ended[process], told.learned[process]
        words = _of_survivor(cell, told.fault_at, one, learned)
        found += [f"process {process}: {w}\n{learned}\n{one.out}\n{one.err}" for w in words]
    if isinstance(cell.victim, int):
        one = told.ended[cell.victim]
        words = _of_victim(cell, told.fault_at, one, told.learned[cell.victim])
        found += [f"the victim: {w}\n{one.out}\n{one.err}" for w in words]
    return found


def _of_survivor(cell: Cell, at: float, one: Ended, learned: Mapping[str, Any]) -> list[str]:
    code = FAILED if cell.fault in FAILS else LOST
    found = [] if one.code in (code, None) else [f"exit code {one.code}, not {code}"]
    kind, name = {LOST: ("ProcessLostError", "lost"), FAILED: ("PeerFailedError", "failed")}[code]
    if not learned or learned["kind"] not in ("ProcessLostError", "PeerFailedError"):
        if not cell.is_native:
            return [*found, "no exception of shoal"]
        return found + _of_report(cell, at, one, learned)
    if learned["kind"] != kind:
        found.append(f"not a {kind}")
    if isinstance(cell.named, int) and cell.named not in learned[name]:
        found.append(f"{name} does not hold {cell.named}")
    if not isinstance(cell.named, int) and cell.named not in learned["words"]:
        found.append(f"its message does not name {cell.named}")
    if _REASONS.get(cell.fault, "") not in learned["words"]:
        found.append("its message does not say why")
    took_s = learned["at"] - at
    if not 0 <= took_s <= BOUND_S[cell.fault]:
        found.append(f"learned after {took_s:.2f} s, not within {BOUND_S[cell.fault]:g} s")
    return found


def _of_report(cell: Cell, at: float, one: Ended, learned: Mapping[str, Any]) -> list[str]:
    """It is ended from outside its main line, or by the transport's error, which is explained."""
    found = []
    code = FAILED if cell.fault in FAILS else LOST
    said = f"{one.err}\n{one.out}"  # under a launcher it is in the log, which holds both
    name = f"process {cell.named} " if isinstance(cell.named, int) else cell.named
    report = [line for line in said.splitlines() if line.startswith(("shoal: ", "  process"))]
    fates = ("has failed", "raised", "exited") if code == FAILED else ("is lost",)
    if not any(name in line and fate in line for line in report for fate in fates):
        found.append(f"no report that {name} {fates[0]}")
    if not any(name in line and _REASONS.get(cell.fault, "") in line for line in report):
        found.append("the report does not say why")
    if not learned and f"is ended with exit code {code}" not in said:
        found.append(f"the report does not name exit code {code}")
    limit_s = BOUND_S[cell.fault] + NATIVE_S
    if not 0 <= one.ended_at - at <= limit_s:
        found.append(f"ended after {one.ended_at - at:.2f} s, not within {limit_s:g} s")
    return found


def _of_victim(cell: Cell, at: float, one: Ended, learned: Mapping[str, Any]) -> list[str]:
    code = VICTIM_CODES[cell.fault]
    found = [] if one.code in (code, None) else [f"exit code {one.code}, not {code}"]
    if cell.services == "launcher" or code != LOST:
        return found
    heard = learned["words"] if learned else one.err
    if cell.fault == "stop" and "declared lost" not in heard + one.err:
        found.append("it was not told that it was declared lost")
    if cell.fault == "cut" and ("cut off" if cell.has_place else PLACE) not in heard + one.err:
        found.append("it was not told who is lost to it")
    limit_s = BOUND_S[cell.fault] + NATIVE_S
    if cell.fault == "cut" and one.ended_at - at > limit_s:
        found.append(f"ended after {one.ended_at - at:.2f} s, not within {limit_s:g} s")
    return found
