"""The host agent: a small process of each host that observes the host's processes from outside.

::

    python -P -m shoal.runtime.jax_service.host_agent    reads orders, one line of JSON, from stdin

The lowest process of each host starts it. It reports to the coordinator which processes of the
host are stopped (a stopped process is as silent as a busy one), and it is the near end of JAX's
service (`jax_proxy`): so it must outlive the process that started it, and no signal to the job
ends it. It exits by itself: when all its processes have ended, or when the job is over and the
proxy is not in use.

If the coordinator dies first, the proxy goes on, because JAX's clients abort without it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from shoal.runtime.jax_service.jax_proxy import ProxiedConnections, find
from shoal.runtime.system.process_status import ProcessStatus, shows_own_pids, status_of
from shoal.runtime.system.service_commands import ignore_job_signals, show_part
from shoal.runtime.wire.connection import Channel
from shoal.runtime.wire.frames import (
    MAX_HELLO_BYTES,
    FrameError,
    number_field,
    pack_frame,
    split_address,
)
from shoal.runtime.wire.proof import introduce

_LOOK_S = 2.0  # maximum interval between checks of the processes
_GONE = ProcessStatus("X", parent=0, session=0, started_ticks=0)


class _HostProcesses:
    """The processes of this host, by their index in the job."""

    def __init__(self, pids: Mapping[int, int], selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._pids = dict(pids)
        self._born = {process: _look(pid).started_ticks for process, pid in pids.items()}
        self.stopped: list[int] = []
        self.ended: list[int] = []
        self.has_news = True
        for pid in pids.values():
            self._await_end(pid)

    @property
    def all_ended(self) -> bool:
        """Return whether all processes have ended."""
        return len(self.ended) == len(self._pids)

    def look(self) -> None:
        """Update the state of the processes that have not ended."""
        stopped = []
        before = (self.stopped, len(self.ended))
        for process, pid in self._pids.items():
            if process not in self.ended:
                status = _look(pid)
                if status.has_ended or status.started_ticks != self._born[process]:
                    self.ended.append(process)
                elif status.is_stopped:
                    stopped.append(process)
        self.stopped = stopped
        self.has_news |= (self.stopped, len(self.ended)) != before

    def _await_end(self, pid: int) -> None:
        """Wake up when it ends, where the kernel supports it (else the next check finds out)."""
        with contextlib.suppress(OSError, AttributeError):
            handle = os.pidfd_open(pid)

            def look(_mask: int) -> None:
                self._selector.unregister(handle)
                os.close(handle)
                self.look()

            self._selector.register(handle, selectors.EVENT_READ, look)


def _look(pid: int) -> ProcessStatus:
    """Return the status of a process; its state is "X" if it is gone, "?" if unknown."""
    status = status_of(pid)
    if status:
        return status
    if shows_own_pids():
        return _GONE
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return _GONE
    except PermissionError:
        pass
    return _GONE._replace(state="?")


class _Reports:
    """The reports to the coordinator: the full state, periodically."""

    def __init__(self, orders: Mapping[str, Any], limit: float, selector: Any) -> None:
        self._selector = selector
        left_s = max(0.001, limit - time.monotonic())
        address = split_address(orders["coordinator"])
        self._socket = socket.create_connection(address, timeout=left_s)
        keep = {"do": "keep", "pid": os.getpid(), **{name: orders[name] for name in _SHOWN}}
        channel = Channel(self._socket, max_body_bytes=MAX_HELLO_BYTES)
        try:
            refusal = introduce(channel, keep, orders["token"], limit)
        except FrameError as error:
            raise ConnectionError(f"the coordinator: {error}") from None
        if refusal is not None:
            raise ConnectionError("the coordinator refused it")
        self._unsent = b""
        self.is_gone = False
        selector.register(self._socket, selectors.EVENT_READ, self._on_read)

    def send(self, kept: _HostProcesses) -> None:
        """Send the states of the processes, unless the last report is still being sent."""
        if self.is_gone:
            return
        states = {"do": "states", "stopped": kept.stopped, "ended": kept.ended}
        data = self._unsent or pack_frame(states)
        try:
            self._unsent = data[self._socket.send(data) :]
        except BlockingIOError:
            self._unsent = data
        except OSError:
            self._end()

    def _on_read(self, _mask: int) -> None:
        try:
            if not self._socket.recv(4096):
                self._end()
        except BlockingIOError:
            pass
        except OSError:
            self._end()

    def _end(self) -> None:
        self.is_gone = True
        self._selector.unregister(self._socket)
        self._socket.close()


_SHOWN = ("process", "incarnation")


class _HostAgent:
    """The host agent of one host, in its own process."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        limit = time.monotonic() + number_field(orders, "timeout_s")
        self._selector = selectors.DefaultSelector()
        kept = {int(process): pid for process, pid in orders["keeps"].items()}
        self._kept = _HostProcesses(kept, self._selector)
        self._look_s = min(number_field(orders, "heartbeat_s"), _LOOK_S)
        self._proxied = self._reports = None
        if orders["jax_service"]:
            far = find(*split_address(orders["jax_service"]), orders["token"], limit)
            self._proxied = ProxiedConnections(self._selector, *far, secret=orders["token"])
            self._proxied.listen()
        if orders["reports"]:
            self._reports = _Reports(orders, limit, self._selector)

    @property
    def address(self) -> str:
        """The address of the proxy; empty without one."""
        return self._proxied.address if self._proxied else ""

    def run(self) -> None:
        """Run until neither a process nor the proxy needs the host agent."""
        due = -math.inf
        while not (self._kept.all_ended or self._is_unneeded()):
            for key, mask in self._selector.select(max(0.0, due - time.monotonic())):
                key.data(mask)
            now = time.monotonic()
            if now >= due:
                self._kept.look()
                if self._proxied:
                    self._proxied.resume_accepting()
            if self._reports and (now >= due or self._kept.has_news):
                self._reports.send(self._kept)
            self._kept.has_news = False
            if now >= due:
                due = now + self._look_s

    def _is_unneeded(self) -> bool:
        """Return whether the job is over and the proxy unused, though processes live on."""
        proxied, reports = self._proxied, self._reports
        if proxied is not None and not proxied.is_idle:
            return False
        if reports is not None:
            return reports.is_gone
        return proxied is None or proxied.has_connected


def main() -> int:
    """Run the host agent by the orders on stdin."""
    show_part("shoal-agent")
    ignore_job_signals()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the starter is not the leader after all, or has died
    try:
        host_agent = _HostAgent(json.loads(line))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    with contextlib.suppress(BrokenPipeError):  # the starter died; other processes may connect
        print(json.dumps({"address": host_agent.address}), flush=True)
    _detach_from_parent()
    host_agent.run()
    return 0


def _detach_from_parent() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    os.close(nothing)


if __name__ == "__main__":
    sys.exit(main())
