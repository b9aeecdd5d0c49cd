"""A process that imports JAX once, and forks into the processes of one `Cluster` after another.

Importing JAX and all of shoal costs a process a second of CPU time; this one spends it once for all
clusters of a test session that have the same environment. A cluster's *group* stands between:

    test ──one order per cluster──▶ fork server ──fork──▶ group ──fork──▶ process 0, process 1, …
    test ◀──"group PID", "INDEX PID", then "INDEX code CODE"── group

Each process has its own environment, session, pipes and (with a network) namespaces before any of
the program runs. JAX has no backend and no thread yet when the server forks. A process ends as any
other does, but leaves the modules that it shares with the server as they are. A group ends after
the last of its processes; if it is killed, so are they. The server ends after its last group, once
the test's end of its socket is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from shoal.testing.enter import enter
from shoal.testing.warden import MARK

__all__ = ["DEVICES", "MOST_FDS", "NO_MARK", "serve"]

NO_MARK = "0" * 16  # the server's own: it outlives each cluster and its warden
MOST_FDS = 250  # in one message; the kernel passes at most 253 (SCM_MAX_FD, unix(7))
DEVICES = "JAX_NUM_CPU_DEVICES"  # JAX reads it when it is imported; a fork sets what is its own
_PR_SET_PDEATHSIG = 1
# A test may send these to everything that a job started; a group is no part of the job.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class GroupOrder(NamedTuple):
    """The processes of one cluster.

    `fds` are the directory they run in, a pipe to report to, then stdout and stderr of each.
    """

    mark: str
    entries: Sequence[dict[str, Any]]  # fields of a `ForkOrder`
    num_fds: int
    fds: Sequence[int] = ()


def serve() -> dict[str, Any]:
    """Fork as the orders on stdin say; returns, in each forked process only, its entry."""
    mark_at = _address_of_mark()
    shared: dict[str, ModuleType] = {}
    atexit.register(_spare, shared)  # before any of them registers its own function: it comes last
    own = {*sys.modules}
    problem = _import_what_is_shared()
    shared |= {name: module for name, module in sys.modules.items() if name not in own}
    with socket.socket(fileno=0) as orders:
        while (order := _next_order(orders)) is not None:
            if _fork() == 0:
                return _be_group(order, mark_at, problem)
            for fd in order.fds:
                os.close(fd)
            _reap(os.WNOHANG)
    _reap(0)
    os._exit(0)


def _import_what_is_shared() -> str:
    """Import what the processes share; return the traceback if that fails, else ""."""
    try:
        import jax  # noqa: F401 - what the processes share

        import shoal.runtime.process  # noqa: F401

        package = sys.modules["shoal"]
        for name in package.__all__:
            getattr(package, name)  # which imports its module
    except BaseException:  # noqa: BLE001 - each process reports it as its own
        return traceback.format_exc()
    gc.collect()
    gc.freeze()  # so that garbage collection in a child does not copy shared pages
    return ""


def _spare(modules: dict[str, ModuleType]) -> None:
    """Let the interpreter's end pass over modules: emptying them would copy all shared pages."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    for name in modules:
        sys.modules.pop(name, None)


def _next_order(orders: socket.socket) -> GroupOrder | None:
    """Receive an order; None: there will be no more."""
    try:
        size = int.from_bytes(_receive(orders, 4), "big")
        order, fds = GroupOrder(**json.loads(_receive(orders, size))), list[int]()
        while len(fds) < order.num_fds:
            data, more, _flags, _address = socket.recv_fds(orders, 1, MOST_FDS)
            if not data:
                return None
            fds += more
    except EOFError:
        return None
    return order._replace(fds=fds)


def _receive(orders: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = orders.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python >= 3.12 warns of threads: those of OpenBLAS, which stops them around a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _reap(options: int) -> None:
    """Collect the groups that have ended; without WNOHANG wait for all."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _be_group(order: GroupOrder, mark_at: int, problem: str) -> dict[str, Any]:
    """Fork into the processes of an order, and report them; returns in these only."""
    _live_apart()
    ctypes.memmove(mark_at, order.mark.encode(), len(NO_MARK))
    os.chdir(order.fds[0])
    _report(order, f"group {os.getpid()}")
    pids = {}
    for index, entry in enumerate(order.entries):
        out, err = order.fds[2 + 2 * index :][:2]
        if problem:
            os.write(err, problem.encode())
            _report(order, f"{index} code 1")
            continue
        pid = _fork()
        if pid == 0:
            _become(entry, out, err, order.fds)
            return entry
        pids[pid] = index
        _report(order, f"{index} {pid}")
    for fd in order.fds[2:]:
        os.close(fd)
    for ignored in _SIGNALS:  # only now: the processes would inherit it
        signal.signal(ignored, signal.SIG_IGN)
    while pids:
        pid, status = os.wait()
        _report(order, f"{pids.pop(pid)} code {os.waitstatus_to_exitcode(status)}")
    os._exit(0)


def _report(order: GroupOrder, line: str) -> None:
    os.write(order.fds[1], f"{line}\n".encode())


def _live_apart() -> None:
    """Have a session of its own, and end with the parent."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(entry: dict[str, Any], out: int, err: int, fds: Sequence[int]) -> None:
    """Make this fork equivalent to a process that was started directly."""
    _live_apart()
    os.environ.clear()
    os.environ.update(entry["env"])
    for path in entry["namespaces"]:
        fd = os.open(path, os.O_RDONLY)
        enter(fd)
        os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    for fd in (nothing, *fds):
        os.close(fd)
    # The server's streams have a position, if what they were opened on had one; a pipe has none.
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, name)
        buffering = 1 if old.line_buffering else -1
        new = open(fd, mode, buffering, old.encoding, old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    num_devices = os.environ.get(DEVICES)
    if num_devices:
        sys.modules["jax"].config.update(DEVICES.lower(), int(num_devices))
    if "numpy.random" in sys.modules:  # unseeded, it differs between processes
        sys.modules["numpy.random"].seed()


def _address_of_mark() -> int:
    """Return where in memory this process's mark is.

    /proc/PID/environ shows the memory that holds the first environment, in forks as well: a group
    writes its cluster's mark there, for the warden to find. A mark has always the same length.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    return int(getenv(MARK.encode()))


if __name__ == "__main__":
    mine = serve()
    from shoal.testing import child

    (child.run_script if mine["is_script"] else child.main)(mine["arguments"])
