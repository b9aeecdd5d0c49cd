"""A process that ends everything a test started, even when the test is killed.

    test process ──pipe──▶ warden

When the pipe closes, the test is over or dead: every process whose environment contains the
test's mark is killed. Children inherit the mark, whatever their session or parent, so there are no
orphans, except processes that a program started without that environment and then left. (Linux.
Elsewhere there is no /proc, and only the processes that the bench started itself are ended, by the
bench.)

With `--network N` the warden also holds N network namespaces and the hub that joins them; the
kernel removes them when it ends. Then lines on the pipe are commands: `cut 2`, `mend 2`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

__all__ = ["MARK", "environment_of", "main", "marked"]

MARK = "SHOAL_BENCH_MARK"
_WITHIN_S = 10.0  # a process in an uninterruptible wait cannot be killed


def environment_of(pid: int) -> dict[bytes, bytes]:
    """Return the environment that a process was started with; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            rows = file.read().split(b"\0")
    except OSError:
        return {}
    return dict(row.split(b"=", 1) for row in rows if b"=" in row)


def marked(mark: str) -> list[int]:
    """Return the pids of the living processes that carry a mark; zombies are not living."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []
    return [p for p in pids if environment_of(p).get(MARK.encode()) == mark.encode() and _lives(p)]


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _end_all(mark: str) -> None:
    """Kill until none is left: a process forked during one pass is found in the next."""
    give_up = time.monotonic() + _WITHIN_S
    while (pids := marked(mark)) and time.monotonic() < give_up:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def main(arguments: list[str]) -> None:
    """Hold the requested resources until stdin closes, then kill all that carry the mark."""
    mark = arguments[0]
    try:
        if len(arguments) > 1:
            from shoal.testing.network import serve_network

            serve_network(int(arguments[2]))
        else:
            print("ready", flush=True)
            while sys.stdin.readline():
                pass
    finally:
        _end_all(mark)


if __name__ == "__main__":
    main(sys.argv[1:])
