"""How long after a fault the survivors hold an exception that names it.

Jobs of 3 processes by `shoal.testing`; the survivors wait in a barrier, or take 10 ms steps. For a
process that raises, the clock starts when it raises; for one that is killed or frozen, when the
signal was sent. A frozen process counts as lost after SHOAL_LOST_AFTER_S.
"""

from __future__ import annotations

import os
import time

from rows import print_row

import shoal
from shoal.errors import PeerFailedError, ProcessLostError
from shoal.testing.cluster import Cluster

ROUNDS, PROCESSES, VICTIM = 5, 3, 1
LOST_AFTER_S = {"SIGSTOP": (2.0, 10.0)}  # the second is the default


def survive(where: str, raises: bool) -> list[float]:
    """In a process: return when this one raised, or when it heard of the other."""
    shoal.barrier("begin")
    if shoal.process_index() == VICTIM:
        print(f"victim {where}", flush=True)
        if raises:
            print(time.monotonic(), flush=True)
            raise RuntimeError("as it was asked to")
    try:
        if where == "barrier" and shoal.process_index() != VICTIM:
            shoal.barrier("end")
        for i in range(10**6):
            with shoal.step(i):
                time.sleep(0.01)
    except (ProcessLostError, PeerFailedError):
        return [time.monotonic()]
    return []


def one(fault: str, where: str, lost_after_s: float) -> float:
    """Run one job; return the milliseconds until the last survivor knew."""
    env = {**os.environ, "SHOAL_LOST_AFTER_S": str(lost_after_s)}
    with Cluster(PROCESSES, env=env, services="stand-alone") as cluster:
        cluster.start(survive, where, fault == "exception")
        cluster.wait_for(f"victim {where}", VICTIM)
        began = time.monotonic()
        if fault == "SIGKILL":
            cluster.kill(VICTIM)
        elif fault == "SIGSTOP":
            cluster.stop(VICTIM)
        survivors = [p for p in range(PROCESSES) if p != VICTIM]
        heard = [one.value[0] for one in cluster.wait(only=survivors)]
        if fault == "exception":
            began = float(cluster.said(VICTIM)[1])
        return (max(heard) - began) * 1e3


def main() -> None:
    """Print a row for each fault and place."""
    for where in ("barrier", "step"):
        for fault in ("SIGKILL", "exception", "SIGSTOP"):
            for lost_after_s in LOST_AFTER_S.get(fault, (10.0,)):
                samples = [one(fault, where, lost_after_s) for _ in range(ROUNDS)]
                case = {"fault": fault, "survivors_in": where, "processes": PROCESSES}
                if fault == "SIGSTOP":
                    case["lost_after_s"] = lost_after_s
                print_row("until the survivors know", case, {"shoal": samples}, "ms")


if __name__ == "__main__":
    main()
