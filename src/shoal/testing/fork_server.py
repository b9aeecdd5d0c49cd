"""A process that imports JAX and forks into the processes of a `Cluster`.

Importing JAX costs each process a second of CPU time; here it is done once per cluster.

    test ──one line of JSON──▶ fork server ──fork──▶ process 0, process 1, …
    test ◀──"INDEX PID", then "INDEX code CODE"── fork server

Each process has its own environment, session, pipes and (with a network) namespaces before any of
the program runs. JAX has no backend and no thread yet when the server forks. The server ends after
the last of its processes; if it is killed, so are they.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import traceback
import warnings
from typing import Any

from shoal.testing.enter import enter

__all__ = ["serve"]

_PR_SET_PDEATHSIG = 1


def serve() -> dict[str, Any]:
    """Fork as requested on stdin; returns, in each forked process only, its entry."""
    orders = json.loads(sys.stdin.readline())
    try:
        import jax  # noqa: F401 - what the processes share

        import shoal.runtime.process  # noqa: F401
    except BaseException:
        for entry in orders[1:]:  # the first shares this process's stderr
            os.write(entry["err"], traceback.format_exc().encode())
        raise
    gc.collect()
    gc.freeze()  # so that garbage collection in a child does not copy shared pages
    pids = {}
    for index, entry in enumerate(orders):
        with warnings.catch_warnings():
            # Python >= 3.12 warns of threads: those of OpenBLAS, which stops them around a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _become(entry, orders)
            return entry  # type: ignore[no-any-return]
        pids[pid] = index
        _say(f"{index} {pid}")
    _close(orders)
    for _ in orders:
        pid, status = os.wait()
        _say(f"{pids[pid]} code {os.waitstatus_to_exitcode(status)}")
    os._exit(0)


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _become(entry: dict[str, Any], orders: list[dict[str, Any]]) -> None:
    """Make this fork equivalent to a process that was started directly."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(entry["env"])
    for path in entry["namespaces"]:
        fd = os.open(path, os.O_RDONLY)
        enter(fd)
        os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (entry["out"], 1), (entry["err"], 2)):
        os.dup2(source, target)
    os.close(nothing)
    _close(orders)
    if "numpy.random" in sys.modules:  # unseeded, it differs between processes
        sys.modules["numpy.random"].seed()


def _close(orders: list[dict[str, Any]]) -> None:
    for entry in orders:
        os.close(entry["out"])
        os.close(entry["err"])


if __name__ == "__main__":
    mine = serve()
    from shoal.testing import child

    child.main(mine["arguments"])
