"""The thread that speaks for this process while its program computes.

It sends a sign of life every SHOAL_HEARTBEAT_S, one way, hears at once who is gone, shows where all
threads stand when it is asked, and knows when the meeting place itself is gone. It needs no more
of the interpreter than a moment now and then; a program that hangs in native code does not stop it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from shoal.runtime.client.known_losses import TICK_S, Troubles
from shoal.runtime.client.progress import Progress
from shoal.runtime.rules.messages import given_of, settled_of
from shoal.runtime.rules.outcomes import ThisProcess
from shoal.runtime.rules.stopping import Stop, Told
from shoal.runtime.rules.trail import Trails
from shoal.runtime.rules.trail_marks import Found, TrailVersion
from shoal.runtime.system.stacks import stacks
from shoal.runtime.wire.connection import Channel
from shoal.runtime.wire.frames import Frame, text_field, whole_field

_LOG = logging.getLogger("shoal")


class Rhythm(NamedTuple):
    """How often a sign of life is due, and how long there may be none, seconds."""

    heartbeat_s: float
    lost_after_s: float


class Echo:
    """Is the other side silent? By this process's own running time, not that of the clock.

    >>> echo = Echo(10.0)
    >>> echo.sent(100.0)
    >>> echo.overslept(60.0)  # this process was stopped for a minute: no fault of the other side
    >>> echo.due
    170.0
    """

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._since = math.inf

    @property
    def due(self) -> float:
        """When it is lost, unless it is heard before."""
        return self._since + self._lost_after_s

    def sent(self, now: float) -> None:
        """Something was sent that must be answered."""
        self._since = min(self._since, now)

    def heard(self) -> None:
        """Something came; all that was sent before counts as answered."""
        self._since = math.inf

    def overslept(self, late_s: float) -> None:
        """This process came to look so much later than it wanted to."""
        self._since += late_s


class Watched(Protocol):
    """What a watcher needs of the coordinator that it works for."""

    @property
    def progress(self) -> Progress:
        """What it tells the others."""

    @property
    def troubles(self) -> Troubles:
        """What it tells this process."""

    @property
    def trails(self) -> Trails:
        """What it tells the others of the calls of this process, and what it hears of them."""

    @property
    def stop(self) -> Stop:
        """What it knows of notices."""

    def tell_stop(self, told: Told) -> None:
        """Send what it has answered, one way."""

    def say(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send one way."""

    def lose(self, reason: str) -> None:
        """The meeting place is lost."""

    def be_lost(self, reason: str) -> None:
        """The meeting place has declared this process lost."""


class Watcher:
    """Watches over the connection that lives as long as the process, and closes it at the end."""

    def __init__(self, life: Channel, rhythm: Rhythm, me: ThisProcess, watched: Watched) -> None:
        self._life = life
        self._rhythm = rhythm
        self._me = me
        self._watched = watched
        self._echo = Echo(rhythm.lost_after_s)
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal watcher", daemon=True)
        self.look: Callable[[float], None] = lambda now: None  # called every moment in trouble

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        """Watch until the connection ends, and over the main line until this process leaves."""
        try:
            self._watch()
        except (OSError, ValueError) as error:
            self._watched.lose(str(error))  # which says nothing if this process has left
        finally:
            self._life.close()
        while not self._has_left.wait(TICK_S):
            self.look(time.monotonic())

    def stop(self) -> None:
        """This process leaves: end the thread."""
        self._has_left.set()
        self._life.shut()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _watch(self) -> None:
        now = time.monotonic()
        beat_at = now if self._rhythm.heartbeat_s < math.inf else math.inf
        while True:
            if now >= beat_at:
                trails = self._watched.trails.beat()
                more = {"trails": trails} if trails else {}
                self._watched.say({"do": "beat", **self._watched.progress.beat(), **more})
                self._echo.sent(now)
                beat_at = now + self._rhythm.heartbeat_s
            in_trouble = self._watched.troubles.open()
            due = min(beat_at, self._echo.due, now + TICK_S if in_trouble else math.inf)
            frame = self._next_frame(due)
            now = time.monotonic()
            # Time in which this process did not run, or its interpreter lock was held.
            if now - due > TICK_S:
                self._echo.overslept(now - due)
            if frame is not None:
                self._echo.heard()
                if not self._on_frame(frame):
                    return
            elif now >= self._echo.due:
                self._watched.lose(f"silent for {self._rhythm.lost_after_s:g} s: frozen or cut off")
                return
            if self._watched.troubles.open():
                self.look(now)

    def _next_frame(self, due: float) -> Frame | None:
        try:
            return self._life.receive(due)
        except TimeoutError as error:
            if error.errno is not None:  # ETIMEDOUT: the kernel has given up on the link
                raise
            return None

    def _on_frame(self, frame: Frame) -> bool:
        """Take what the meeting place says; False: it was its last word."""
        kind, words = text_field(frame.header, "is"), frame.body.decode(errors="replace")
        if kind == "gone":
            process = frame.header.get("process")
            name, state = text_field(frame.header, "name"), text_field(frame.header, "state")
            self._watched.troubles.hear(process, name, state, words)
            self._watched.stop.wake()
        elif kind == "notice":
            number, process = (whole_field(frame.header, name) for name in ("number", "process"))
            told = self._watched.stop.hear(number, process, given_of(frame.header))
            if told is not None:
                self._watched.tell_stop(told)
        elif kind == "stop":
            self._watched.stop.settle(settled_of(frame))
        elif kind == "trail":
            group, lane = frame.header.get("group"), text_field(frame.header, "lane")
            members = None if group is None else tuple(group)
            versions = [TrailVersion(*row) for row in json.loads(frame.body)]
            base = text_field(frame.header, "base")
            self._watched.trails.hear(Found(members, lane, base, versions))
        elif kind == "silent":
            silent = self._me.name(whole_field(frame.header, "process"))
            with contextlib.suppress(Exception):  # what handlers and filters raise is not ours
                _LOG.warning("%s: %s is silent: %s", self._me, silent, words)
        elif kind == "stacks":
            answer = {"do": "stacks", "ticket": whole_field(frame.header, "ticket")}
            try:
                text = stacks()
            except OSError as error:  # too many open files, say: no reason to lose the job
                text = f"no stacks: {error}"
            body = text.encode(errors="replace")
            self._watched.say({**answer, **self._watched.progress.beat()}, body)
        elif kind == "lost":
            self._watched.be_lost(words)
            return False
        return True  # an echo, or something that a later meeting place says
