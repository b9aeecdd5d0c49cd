"""The keeper of a host: a small process that observes the host's processes from outside.

::

    python -P -m shoal.runtime.jax_service.keeper    reads its orders, one line of JSON, from stdin

The lowest process of each host starts one. It reports to the meeting place which processes of the
host are stopped (a stopped process is as silent as a busy one), and it is the near end of JAX's
service (`tcp_splice`): so it must outlive the process that started it, and no signal to the job
ends it. It exits by itself: when all its processes have ended, or when the job is over and the
splice is not in use.

If the meeting place dies first, the splice goes on, because JAX's clients abort without it.
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

from shoal.runtime.system.process_status import ProcessStatus, shows_own_pids, status_of
from shoal.runtime.system.service_commands import ignore_job_signals, show_part
from shoal.runtime.wire.connection import Channel
from shoal.runtime.wire.frames import (
    MAX_HELLO_BYTES,
    FrameError,
    address_text,
    number_field,
    pack_frame,
    split_address,
)
from shoal.runtime.wire.proof import introduce
from shoal.runtime.wire.server_sockets import EXHAUSTED

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
    if status := status_of(pid):
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
    """The reports to the meeting place: the full state, periodically."""

    def __init__(self, orders: Mapping[str, Any], limit: float, selector: Any) -> None:
        self._selector = selector
        left_s = max(0.001, limit - time.monotonic())
        address = split_address(orders["meeting_place"])
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


class _Keeper:
    """The keeper process of one host."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        limit = time.monotonic() + number_field(orders, "timeout_s")
        self._selector = selectors.DefaultSelector()
        kept = {int(process): pid for process, pid in orders["keeps"].items()}
        self._kept = _HostProcesses(kept, self._selector)
        self._look_s = min(number_field(orders, "heartbeat_s"), _LOOK_S)
        self._splices = self._reports = None
        if orders["jax_service"]:
            far = find(*split_address(orders["jax_service"]), limit)
            self._splices = Splices(self._selector, *far)
        if orders["reports"]:
            self._reports = _Reports(orders, limit, self._selector)

    @property
    def address(self) -> str:
        """The address of the splice; empty without one."""
        return self._splices.address if self._splices else ""

    def run(self) -> None:
        """Run until no process and no splice needs the keeper."""
        due = -math.inf
        while not (self._kept.all_ended or self._is_unneeded()):
            for key, mask in self._selector.select(max(0.0, due - time.monotonic())):
                key.data(mask)
            now = time.monotonic()
            if now >= due:
                self._kept.look()
                if self._splices:
                    self._splices.resume_accepting()
            if self._reports and (now >= due or self._kept.has_news):
                self._reports.send(self._kept)
            self._kept.has_news = False
            if now >= due:
                due = now + self._look_s

    def _is_unneeded(self) -> bool:
        """Return whether the job is over and the splice unused, though processes live on."""
        splices, reports = self._splices, self._reports
        if splices is not None and not splices.is_idle:
            return False
        if reports is not None:
            return reports.is_gone
        return splices is None or splices.has_connected


def main() -> int:
    """Run the keeper of the host given by the orders on stdin."""
    show_part("shoal-keeper")
    ignore_job_signals()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the starter is not the leader after all, or has died
    try:
        keeper = _Keeper(json.loads(line))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    with contextlib.suppress(BrokenPipeError):  # the starter died; other processes may connect
        print(json.dumps({"address": keeper.address}), flush=True)
    _detach_from_parent()
    keeper.run()
    return 0


def _detach_from_parent() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    os.close(nothing)


# ---- A TCP splice: a proxy whose near connection outlives its far one.
#
# JAX's client ends its process in C++ within a tenth of a second of the end of its connection.
# Behind a splice on its own host it never sees that end: when JAX's service dies, or its host
# does, the near connection stays open and silent, and the loss becomes a Python exception (by the
# meeting place).
#
# ::
#
#     JAX's client ──near──▶ splice (loopback) ──far──▶ JAX's service
#
# Forwarded: bytes both ways, with at most one chunk buffered in each direction; the near end's
# close, half or whole; a refusal by the far end, as long as none has accepted yet. Not forwarded:
# the close of the far end, unless the near end has closed before.


_CHUNK_BYTES = 1 << 16
_PAUSE_S = 0.05  # between attempts while the far end does not listen yet

Address = tuple[Any, ...]  # as in `socket`: two fields, or four with IPv6


def find(host: str, port: int, limit: float) -> tuple[socket.AddressFamily, Address]:
    """Return the first address of a name that accepts connections.

    Raises:
      OSError: none did by `limit`, on the monotonic clock.
    """
    while True:
        left_s = limit - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.001, left_s)) as found:
                return found.family, found.getpeername()
        except OSError:
            if left_s <= _PAUSE_S:
                raise
        time.sleep(_PAUSE_S)


class Splices:
    """All connections to one far address, in a selector that the caller drives.

    The caller calls the `data` of each key that is ready, with its mask.
    """

    def __init__(
        self, selector: selectors.BaseSelector, family: socket.AddressFamily, far: Address
    ) -> None:
        self.selector = selector
        self.family, self.far = family, far
        self.has_connected = False  # to the far end, at least once
        self.pairs: set[_Pair] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self.address = address_text(*self._listener.getsockname())
        self.resume_accepting()

    @property
    def is_idle(self) -> bool:
        """Return whether no near end is open; a closed one may still wait for a frozen far end."""
        return all(pair.near_ended for pair in self.pairs)

    def close(self) -> None:
        """Close everything."""
        for pair in tuple(self.pairs):
            pair.close()
        if self._listener.fileno() in self.selector.get_map():
            self.selector.unregister(self._listener)
        self._listener.close()

    def resume_accepting(self) -> None:
        """Accept again, if it has stopped; to be called now and then, as descriptors become free.

        A pair that closes calls it too.
        """
        if self._listener.fileno() not in self.selector.get_map():
            self.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _mask: int) -> None:
        far = None
        try:
            far = socket.socket(self.family, socket.SOCK_STREAM)
            near, _ = self._listener.accept()
        except OSError as error:
            if far is not None:
                far.close()
            if error.errno in EXHAUSTED:  # otherwise select would report it forever
                self.selector.unregister(self._listener)
        else:
            self.pairs.add(_Pair(self, near, far))


class _Pair:
    """One connection, in two halves. `to_far` and `to_near` buffer unsent bytes."""

    def __init__(self, splices: Splices, near: socket.socket, far: socket.socket) -> None:
        self._splices = splices
        self._near, self._far = near, far
        self._to_far = self._to_near = b""
        self.near_ended = False  # it sends nothing more
        self._far_ended = self._is_shut = False
        self._is_connecting = True
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.connect_ex(splices.far)  # the outcome is known when it becomes writable
        self._watch()

    def close(self) -> None:
        """Close both ends."""
        for end in (self._near, self._far):
            self._await(end, 0, self._on_near)
            end.close()
        self._splices.pairs.discard(self)
        self._splices.resume_accepting()

    @property
    def _is_lost(self) -> bool:
        """Return whether the far end is gone."""
        return self._far.fileno() < 0

    def _on_near(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_READ:
                data = _read(self._near)
                self.near_ended |= data == b""
                self._to_far = b"" if self._is_lost else data or b""
            if mask & selectors.EVENT_WRITE:
                self._to_near = _write(self._near, self._to_near)
        except OSError:
            self.close()
            return
        self._go_on()

    def _on_far(self, mask: int) -> None:
        try:
            if self._is_connecting:
                self._note_connected()
            elif mask & selectors.EVENT_WRITE:
                self._to_far = _write(self._far, self._to_far)
            if mask & selectors.EVENT_READ:
                data = _read(self._far)
                self._far_ended |= data == b""
                self._to_near = data or b""
        except OSError:
            if not self._splices.has_connected:
                self.close()  # refused, as it would be without a splice
                return
            self._lose()
        self._go_on()

    def _note_connected(self) -> None:
        error = self._far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "not connected")
        self._is_connecting = False
        self._splices.has_connected = True

    def _lose(self) -> None:
        self._await(self._far, 0, self._on_far)
        self._far.close()
        self._splices.resume_accepting()
        self._far_ended, self._is_connecting, self._to_far = True, False, b""

    def _go_on(self) -> None:
        """Forward a pending close, or wait for the next event."""
        if self.near_ended and not (self._to_far or self._is_connecting or self._is_shut):
            self._is_shut = True
            with contextlib.suppress(OSError):  # it is gone, as the next read will show
                self._far.shutdown(socket.SHUT_WR)
        if self.near_ended and self._far_ended and not self._to_near:
            self.close()
        else:
            self._watch()

    def _watch(self) -> None:
        # An end is read only while nothing is left to be written to the other: so one chunk in each
        # direction is all that is kept, and the kernel slows down a sender that is too fast.
        wants = selectors.EVENT_WRITE if self._to_near else 0
        if not (self.near_ended or self._to_far or self._is_connecting):
            wants |= selectors.EVENT_READ
        self._await(self._near, wants, self._on_near)
        if self._is_lost:
            return
        wants = selectors.EVENT_WRITE if self._to_far or self._is_connecting else 0
        if not (self._far_ended or self._to_near or self._is_connecting):
            wants |= selectors.EVENT_READ
        self._await(self._far, wants, self._on_far)

    def _await(self, end: socket.socket, events: int, then: Any) -> None:
        selector = self._splices.selector
        if end.fileno() < 0:
            return
        known = selector.get_map().get(end)
        if known is None and events:
            selector.register(end, events, then)
        elif known is not None and not events:
            selector.unregister(end)
        elif known is not None and known.events != events:
            selector.modify(end, events, then)


def _read(end: socket.socket) -> bytes | None:
    """Return the bytes received: b"" at the end, None if there were none."""
    try:
        return end.recv(_CHUNK_BYTES)
    except BlockingIOError:
        return None


def _write(end: socket.socket, data: bytes) -> bytes:
    """Return the bytes that could not be written yet."""
    try:
        return data[end.send(data) :]
    except BlockingIOError:
        return data


if __name__ == "__main__":
    sys.exit(main())
