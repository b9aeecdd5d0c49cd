"""The watcher thread, which speaks for this process while its program computes.

It sends a heartbeat every SHOAL_HEARTBEAT_S, one way; receives news of losses at once; dumps the
stacks of all threads on request; and notices when the coordinator is gone. It needs the
interpreter for a moment now and then, so a program that hangs in native code does not stop it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from shoal.runtime.client.known_losses import TICK_S, PeerLosses
from shoal.runtime.client.outcomes import ThisProcess
from shoal.runtime.client.programs import ProgramNotes
from shoal.runtime.client.progress import Progress
from shoal.runtime.failures.program_text import program_warning
from shoal.runtime.rules.call_record import CallRecords
from shoal.runtime.rules.messages import (
    departure_of,
    notice_of,
    save_order_of,
    stop_agreement_of,
)
from shoal.runtime.rules.point import Departure
from shoal.runtime.rules.programs import differences_of, noted_rows
from shoal.runtime.rules.record_marks import Found, RecordVersion
from shoal.runtime.rules.requested_saves import SaveReport
from shoal.runtime.rules.stalls import Stall, seen_header, stall_of
from shoal.runtime.rules.stopping import PreemptionState, StopReport
from shoal.runtime.system.stacks import seen, stacks
from shoal.runtime.wire.connection import Channel
from shoal.runtime.wire.frames import Frame, body_value, text_field, whole_field
from shoal.runtime.wire.socket_calls import LinkTimeoutError

_LOG = logging.getLogger("shoal")


class HeartbeatTiming(NamedTuple):
    """Interval between heartbeats, and how long they may be absent, seconds."""

    heartbeat_s: float
    lost_after_s: float


class SilenceDetector:
    """Detect a silent peer, counting only the time during which this process ran.

    >>> detector = SilenceDetector(10.0)
    >>> detector.sent(100.0)
    >>> detector.suspended(60.0)  # this process was stopped for a minute
    >>> detector.due
    170.0
    """

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._since = math.inf

    @property
    def due(self) -> float:
        """The time at which the peer counts as lost, unless a frame arrives before."""
        return self._since + self._lost_after_s

    def sent(self, now: float) -> None:
        """Record that a frame was sent that must be answered."""
        self._since = min(self._since, now)

    def heard(self) -> None:
        """Record that a frame arrived; everything sent before counts as answered."""
        self._since = math.inf

    def suspended(self, late_s: float) -> None:
        """Record that this process woke up this many seconds later than intended."""
        self._since += late_s


class StallLook(Protocol):
    """Checks whether this process is idle: see `exit.idle`."""

    @property
    def every_s(self) -> float:
        """How often to look, seconds."""

    def look(self, now: float) -> None:
        """Check the main thread; called at least every `every_s`."""

    def on_left(self) -> None:
        """Take the news that a process has left in order."""

    def on_stalled(
        self, stall: Stall, representatives: Sequence[int], *, prints_report: bool
    ) -> None:
        """Take the decision of the coordinator."""


class Watched(Protocol):
    """The job client as its watcher sees it."""

    @property
    def progress(self) -> Progress:
        """The progress to report."""

    @property
    def peer_losses(self) -> PeerLosses:
        """The losses to report to this process."""

    @property
    def call_records(self) -> CallRecords:
        """The call records of this process, to report and to compare."""

    @property
    def programs(self) -> ProgramNotes:
        """The programs that this process has compiled for devices of several."""

    stall: Stall | None
    """The stall that has ended the job."""

    @property
    def stop(self) -> PreemptionState:
        """The state of preemption notices."""

    def report_stop(self, report: StopReport) -> None:
        """Send an answer about stopping, one way."""

    def report_save(self, report: SaveReport) -> None:
        """Send an answer to a request to save, one way."""

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send one way."""

    def lose(self, reason: str) -> None:
        """Handle the loss of the coordinator."""

    def on_declared_lost(self, departure: Departure) -> None:
        """Handle the declaration that this process is lost."""


class Watcher:
    """Serves the connection that lives as long as the process, and closes it at the end."""

    def __init__(
        self, life: Channel, timing: HeartbeatTiming, me: ThisProcess, watched: Watched
    ) -> None:
        self._life = life
        self._timing = timing
        self._me = me
        self._watched = watched
        self._echo = SilenceDetector(timing.lost_after_s)
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal watcher", daemon=True)
        self.look: Callable[[float], None] = lambda now: None  # after a loss, every TICK_S
        self.stall: StallLook | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        """Serve the connection until it ends; watch the main thread until this process leaves."""
        try:
            self._watch()
        except (OSError, ValueError) as error:
            self._watched.lose(str(error))  # ignored if this process has left
        finally:
            self._life.close()
        while not self._has_left.wait(TICK_S):
            self.look(time.monotonic())

    def stop(self) -> None:
        """End the thread, because this process leaves."""
        self._has_left.set()
        self._life.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _watch(self) -> None:
        now = time.monotonic()
        beat_at = now if self._timing.heartbeat_s < math.inf else math.inf
        while True:
            if now >= beat_at:
                grown = self._watched.call_records.beat()
                more: dict[str, Any] = {"trails": grown} if grown else {}
                noted = noted_rows(self._watched.programs.beat())
                if noted:
                    more["programs"] = noted
                self._watched.send({"do": "beat", **self._watched.progress.beat(), **more})
                self._echo.sent(now)
                beat_at = now + self._timing.heartbeat_s
            call_records = self._watched.call_records
            is_watching = self._watched.peer_losses.open() or call_records.found is not None
            due = min(beat_at, self._echo.due, now + TICK_S if is_watching else math.inf)
            if self.stall is not None:
                # Whatever fails there must not lose the job: this thread speaks for the process.
                with contextlib.suppress(Exception):
                    self.stall.look(now)
                due = min(due, now + self.stall.every_s)
            frame = self._next_frame(due)
            now = time.monotonic()
            # Exclude time in which this process did not run, or its interpreter lock was held.
            if now - due > TICK_S:
                self._echo.suspended(now - due)
            if frame is not None:
                self._echo.heard()
                if not self._on_frame(frame):
                    return
            elif now >= self._echo.due:
                self._watched.lose(
                    f"silent for {self._timing.lost_after_s:g} s: frozen or disconnected"
                )
                return
            if self._watched.peer_losses.open() or call_records.found is not None:
                self.look(now)

    def _next_frame(self, due: float) -> Frame | None:
        try:
            return self._life.receive(due)
        except LinkTimeoutError:
            return None

    def _on_frame(self, frame: Frame) -> bool:
        """Handle a frame; return False after the last one."""
        kind = text_field(frame.header, "is")
        if kind == "lost":
            self._watched.on_declared_lost(departure_of(frame))
            return False
        take = self._NEWS.get(kind)
        if take is not None:  # else an echo, or news of a newer coordinator
            take(self, frame)
        return True

    def _gone(self, frame: Frame) -> None:
        process, name = frame.header.get("process"), text_field(frame.header, "name")
        self._note_programs(frame)
        self._watched.peer_losses.receive(process, name, departure_of(frame))
        self._watched.stop.wake()

    def _note_programs(self, frame: Frame) -> None:
        """Keep the differences in compiled programs for the report of a hang."""
        differences = differences_of(frame.header.get("programs", [[], 0]))
        self._watched.programs.differences = differences

    def _left(self, _frame: Frame) -> None:
        if self.stall is not None:
            self.stall.on_left()

    def _notice(self, frame: Frame) -> None:
        number, process = (whole_field(frame.header, name) for name in ("number", "process"))
        report = self._watched.stop.receive(number, process, notice_of(frame.header))
        if report is not None:
            self._watched.report_stop(report)

    def _stop(self, frame: Frame) -> None:
        self._watched.stop.settle(stop_agreement_of(frame))

    def _save(self, frame: Frame) -> None:
        report = self._watched.stop.saves.receive(save_order_of(frame.header))
        if report is not None:
            self._watched.report_save(report)

    def _call_record(self, frame: Frame) -> None:
        group, lane = frame.header.get("group"), text_field(frame.header, "lane")
        members = None if group is None else tuple(group)
        versions = [RecordVersion(*row) for row in json.loads(frame.body)]
        base = text_field(frame.header, "base")
        self._note_programs(frame)
        self._watched.call_records.receive(Found(members, lane, base, versions))

    def _stalled(self, frame: Frame) -> None:
        header = frame.header
        representatives, stall = header.get("shows"), stall_of(body_value(frame))
        if stall.is_final:
            self._watched.stall = stall
        if self.stall is not None and isinstance(representatives, list):
            prints_report = header.get("shower") == self._me.process
            with contextlib.suppress(Exception):  # `look` then ends what hangs, a little later
                self.stall.on_stalled(stall, representatives, prints_report=prints_report)

    def _locate(self, frame: Frame) -> None:
        """Find out where a silent process of this host stands, and what it does."""
        process, pid = (whole_field(frame.header, name) for name in ("process", "pid"))
        self._watched.send(seen_header(process, seen(pid)))

    def _reporter(self, _frame: Frame) -> None:
        self._watched.send({"do": "reporter"})

    def _silent(self, frame: Frame) -> None:
        silent = self._me.name(whole_field(frame.header, "process"))
        with contextlib.suppress(Exception):  # handlers and filters may raise
            _LOG.warning("%s: %s is silent: %s", self._me, silent, _words(frame))

    def _programs(self, frame: Frame) -> None:
        with contextlib.suppress(Exception):  # handlers and filters may raise
            differences = differences_of(frame.header.get("programs"))
            _LOG.warning("%s: %s", self._me, program_warning(differences))

    def _stacks(self, frame: Frame) -> None:
        answer = {"do": "stacks", "ticket": whole_field(frame.header, "ticket")}
        try:
            text = stacks()
        except OSError as error:  # e.g. too many open files: no reason to lose the job
            text = f"no stacks: {error}"
        body = text.encode(errors="replace")
        self._watched.send({**answer, **self._watched.progress.beat()}, body)

    # What the coordinator sends beside echoes; "lost", that this process is, comes last.
    _NEWS: ClassVar[Mapping[str, Callable[[Watcher, Frame], None]]] = {
        "gone": _gone,  # a process or a service
        "left": _left,  # the first process that left in order
        "notice": _notice,  # of preemption
        "stop": _stop,  # the agreed step
        "save": _save,  # a request to save, or its agreed step
        "trail": _call_record,  # a call record that differs between processes
        "silent": _silent,  # a process that runs, and gives no sign of life
        "programs": _programs,  # that only some have compiled
        "stacks": _stacks,  # a request for those of this process
        "stalled": _stalled,  # the job
        "reporter": _reporter,  # a request to confirm that it is there to report a failure
        "locate": _locate,  # a request to look at a silent process of this host
    }


def _words(frame: Frame) -> str:
    return frame.body.decode(errors="replace")
