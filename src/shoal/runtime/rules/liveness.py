"""The rules of liveness, as a pure state machine: no socket, no thread, no clock.

Silence is not death: a process that holds the interpreter lock, or serializes six million objects,
gives no heartbeat for many seconds. So a process that was silent for `lost_after_s` is *silent*,
and *lost* only if it is known to be stopped; otherwise it is lost after `silent_lost_after_s`.

Silence is counted in the time during which the counting process itself ran (`RunningClock`): a
coordinator that was stopped, or whose laptop slept, must not declare every process dead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from shoal import settings

Key = TypeVar("Key", bound=Hashable)

_ENDED_S = 0.3  # until then the end of its connection is a better report of how a process ended
_LONGEST_TICK_S = 0.25


class Limits(NamedTuple):
    """Interval of heartbeats, and the limits of silence. `inf` disables a limit."""

    heartbeat_s: float
    lost_after_s: float
    silent_lost_after_s: float

    @classmethod
    def of_settings(cls) -> Limits:
        """Return the limits of the settings; several heartbeats always fit before a loss.

        Raises:
          UsageError: a variable is not a positive number.
        """
        lost_after_s = settings.seconds("SHOAL_LOST_AFTER_S")
        silent_lost_after_s = settings.seconds("SHOAL_SILENT_LOST_AFTER_S")
        often_s = min(lost_after_s, silent_lost_after_s) / 4
        heartbeat_s = min(settings.seconds("SHOAL_HEARTBEAT_S"), often_s)
        return cls(heartbeat_s, lost_after_s, silent_lost_after_s)

    @property
    def words(self) -> dict[str, float | None]:
        """The limits as sent to processes and services: null stands for infinity."""
        limits = {"heartbeat_s": self.heartbeat_s, "lost_after_s": self.lost_after_s}
        return {name: None if value == math.inf else value for name, value in limits.items()}

    @property
    def tick_s(self) -> float:
        """The interval at which silence must be counted."""
        return min(_LONGEST_TICK_S, min(self.lost_after_s, self.silent_lost_after_s) / 4)


class RunningClock:
    """The time during which this process ran: intervals much longer than a tick do not count.

    >>> clock = RunningClock(100.0, tick_s=1.0)
    >>> clock.read(101.0), clock.read(3600.0), clock.read(3600.5)
    (1.0, 3.0, 3.5)
    """

    def __init__(self, now: float, *, tick_s: float) -> None:
        self._most_s = 2 * tick_s
        self._last = now
        self._ran_s = 0.0

    def read(self, now: float) -> float:
        """Return the seconds so far. Must be called at least once a tick."""
        if now > self._last:
            self._ran_s += min(now - self._last, self._most_s)
            self._last = now
        return self._ran_s


class LivenessVerdict(NamedTuple, Generic[Key]):
    """The verdict on a silent process or service."""

    key: Key
    state: str  # "silent" | "lost"
    words: str
    silent_s: float


class _Silence:
    """A process or service that has given no heartbeat for a while."""

    __slots__ = ("is_named", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.is_named = False  # whether its silence was reported


class Liveness(Generic[Key]):
    """The time of the last heartbeat by key. Taking one costs O(1)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._quiet_after_s = min(limits.lost_after_s, limits.silent_lost_after_s)
        self._beats: dict[Key, float] = {}  # the longest silent first
        self._quiet: dict[Key, _Silence] = {}
        self._stopped: set[Key] = set()
        self._ended: dict[Key, float] = {}  # the process has ended; since when

    @property
    def is_watching(self) -> bool:
        """Whether there is any key to watch."""
        return bool(self._beats or self._quiet)

    def watch(self, now: float, key: Key) -> None:
        """Start watching a key."""
        self._beats[key] = now

    def forget(self, key: Key) -> None:
        """Stop watching a key."""
        self._beats.pop(key, None)
        self._quiet.pop(key, None)
        self._stopped.discard(key)
        self._ended.pop(key, None)

    def beat(self, now: float, key: Key) -> bool:
        """Take a heartbeat; return whether it ends a reported silence."""
        if key in self._beats:
            del self._beats[key]
            self._beats[key] = now  # moves to the end
            return False
        quiet = self._quiet.pop(key, None)
        if quiet is None:
            return False
        self._beats[key] = now
        return quiet.is_named

    def states(
        self, now: float, of: Collection[Key], *, stopped: Collection[Key], ended: Collection[Key]
    ) -> None:
        """Take a host agent's report on the processes `of`: which are stopped or have ended."""
        for key in of:
            quiet = self._quiet.get(key)
            if quiet is None and key not in self._beats:
                continue  # it has gone
            if key in stopped:
                self._stopped.add(key)
            elif key in self._stopped:
                self._stopped.discard(key)
                if quiet is not None:
                    quiet.since = now  # it can give a sign of life again only from now on
            if key in ended:
                self._ended.setdefault(key, now)

    def silent_s(self, now: float, key: Key) -> float:
        """Return how long ago its last heartbeat came; 0 if it is stopped or gone."""
        quiet = self._quiet.get(key)
        since = self._beats.get(key, now) if quiet is None else quiet.since
        return 0.0 if key in self._stopped else now - since

    def is_quiet(self, key: Key) -> bool:
        """Return whether it has given no heartbeat for long."""
        return key in self._quiet

    def next_deadline(self) -> float:
        """The time at which `tick` must be called; never too late."""
        due = math.inf
        for since in self._beats.values():
            due = since + self._quiet_after_s
            break
        for key, quiet in self._quiet.items():
            due = min(due, quiet.since + self._limit_s(key))
            if not quiet.is_named:
                due = min(due, quiet.since + self._limits.lost_after_s)
        return min(due, *(since + _ENDED_S for since in self._ended.values()), math.inf)

    def tick(self, now: float) -> list[LivenessVerdict[Key]]:
        """Return new verdicts: silent or lost. Lost keys are forgotten."""
        while self._beats:
            key, since = next(iter(self._beats.items()))
            if now < since + self._quiet_after_s:
                break
            del self._beats[key]
            self._quiet[key] = _Silence(since)
        verdicts = [verdict for key in self._quiet if (verdict := self._judge(now, key))]
        for key, since in self._ended.items():
            if now >= since + _ENDED_S:
                verdicts = [verdict for verdict in verdicts if verdict.key != key]
                verdicts.append(
                    LivenessVerdict(key, "lost", "its process ended without leaving the job", 0.0)
                )
        for verdict in verdicts:
            if verdict.state == "lost":
                self.forget(verdict.key)
        return verdicts

    def _limit_s(self, key: Key) -> float:
        """Return how long a key may be silent, seconds."""
        is_stopped = key in self._stopped
        return self._limits.lost_after_s if is_stopped else self._limits.silent_lost_after_s

    def _judge(self, now: float, key: Key) -> LivenessVerdict[Key] | None:
        quiet = self._quiet[key]
        silent_s = now - quiet.since
        silence = f"silent for {silent_s:.0f} s"
        if now >= quiet.since + self._limit_s(key):
            is_stopped = key in self._stopped
            reason = f"stopped (SIGSTOP?), {silence}" if is_stopped else silence
            return LivenessVerdict(key, "lost", reason, silent_s)
        if quiet.is_named or now < quiet.since + self._limits.lost_after_s:
            return None
        quiet.is_named = True
        how = "it is stopped" if key in self._stopped else "it may hold the interpreter lock"
        return LivenessVerdict(key, "silent", f"{silence}; {how}", silent_s)
