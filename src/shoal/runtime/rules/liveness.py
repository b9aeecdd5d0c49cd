"""The rules of who is alive, as a pure state machine: no socket, no thread, no clock of its own.

Silence is not death: a process that holds the interpreter lock, or serializes six million objects,
gives no sign of life for many seconds. So a process that was silent for `lost_after_s` is *silent*,
and *lost* only if it is known to be stopped. Who is not, has `silent_lost_after_s`.

The time that is counted here is that during which the counter itself ran (`RunningClock`): a
meeting place that was stopped, or whose laptop slept, must not find everybody dead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from shoal import settings

Key = TypeVar("Key", bound=Hashable)

_ENDED_S = 0.3  # until then the end of its connection says better how a process ended
_LONGEST_TICK_S = 0.25


class Limits(NamedTuple):
    """How often signs of life are due, and what follows from silence. `inf` switches off."""

    heartbeat_s: float
    lost_after_s: float
    silent_lost_after_s: float

    @classmethod
    def of_settings(cls) -> Limits:
        """Return what the environment says; a few signs of life always fit before a loss.

        Raises:
          UsageError: a variable is no positive number.
        """
        lost_after_s = settings.seconds("SHOAL_LOST_AFTER_S")
        silent_lost_after_s = settings.seconds("SHOAL_SILENT_LOST_AFTER_S")
        often_s = min(lost_after_s, silent_lost_after_s) / 4
        heartbeat_s = min(settings.seconds("SHOAL_HEARTBEAT_S"), often_s)
        return cls(heartbeat_s, lost_after_s, silent_lost_after_s)

    @property
    def words(self) -> dict[str, float | None]:
        """What those are told who must give signs of life: null stands for infinity."""
        told = {"heartbeat_s": self.heartbeat_s, "lost_after_s": self.lost_after_s}
        return {name: None if value == math.inf else value for name, value in told.items()}

    @property
    def tick_s(self) -> float:
        """How often who counts silence must look at the clock."""
        return min(_LONGEST_TICK_S, min(self.lost_after_s, self.silent_lost_after_s) / 4)


class RunningClock:
    """The time during which this process ran: what is much longer than a tick is no time.

    >>> clock = RunningClock(100.0, tick_s=1.0)
    >>> clock.read(101.0), clock.read(3600.0), clock.read(3600.5)
    (1.0, 3.0, 3.5)
    """

    def __init__(self, now: float, *, tick_s: float) -> None:
        self._most_s = 2 * tick_s
        self._last = now
        self._ran_s = 0.0

    def read(self, now: float) -> float:
        """Return the seconds so far. To be called once a tick, or more often."""
        self._ran_s += min(max(0.0, now - self._last), self._most_s)
        self._last = max(now, self._last)
        return self._ran_s


class LivenessVerdict(NamedTuple, Generic[Key]):
    """What has become of somebody."""

    key: Key
    state: str  # "silent" | "lost"
    words: str
    silent_s: float


class _Quiet:
    """Somebody who has given no sign of life for a while."""

    __slots__ = ("is_named", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.is_named = False  # was it said that it is silent?


class Liveness(Generic[Key]):
    """Who gave a sign of life when. A sign costs the same however many are watched."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._quiet_after_s = min(limits.lost_after_s, limits.silent_lost_after_s)
        self._beats: dict[Key, float] = {}  # the one silent longest is the first
        self._quiet: dict[Key, _Quiet] = {}
        self._stopped: set[Key] = set()
        self._ended: dict[Key, float] = {}  # the process has ended; since when

    def watch(self, now: float, key: Key) -> None:
        """Somebody is here."""
        self._beats[key] = now

    def forget(self, key: Key) -> None:
        """Somebody has gone, for whatever reason."""
        self._beats.pop(key, None)
        self._quiet.pop(key, None)
        self._stopped.discard(key)
        self._ended.pop(key, None)

    def beat(self, now: float, key: Key) -> bool:
        """A sign of life. Return whether it was said to be silent, and is not any more."""
        if key in self._beats:
            del self._beats[key]
            self._beats[key] = now  # to the end
            return False
        quiet = self._quiet.pop(key, None)
        if quiet is None:
            return False
        self._beats[key] = now
        return quiet.is_named

    def states(
        self, now: float, of: Collection[Key], *, stopped: Collection[Key], ended: Collection[Key]
    ) -> None:
        """Somebody who can see the processes `of` says which are stopped or have ended."""
        for key in of:
            quiet = self._quiet.get(key)
            if quiet is None and key not in self._beats:
                continue  # it has gone
            if key in stopped:
                self._stopped.add(key)
            elif key in self._stopped:
                self._stopped.discard(key)
                if quiet is not None:
                    quiet.since = now  # only now it can give a sign again
            if key in ended:
                self._ended.setdefault(key, now)

    def is_quiet(self, key: Key) -> bool:
        """Has it given no sign of life for long?"""
        return key in self._quiet

    def next_deadline(self) -> float:
        """When `tick` must be called; never too late."""
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
        """Return who has become silent, or is lost; who is lost is forgotten."""
        while self._beats:
            key, since = next(iter(self._beats.items()))
            if now < since + self._quiet_after_s:
                break
            del self._beats[key]
            self._quiet[key] = _Quiet(since)
        verdicts = [verdict for key in self._quiet if (verdict := self._judge(now, key))]
        for key, since in self._ended.items():
            if now >= since + _ENDED_S:
                verdicts = [verdict for verdict in verdicts if verdict.key != key]
                verdicts.append(
                    LivenessVerdict(key, "lost", "its process ended without a word", 0.0)
                )
        for verdict in verdicts:
            if verdict.state == "lost":
                self.forget(verdict.key)
        return verdicts

    def _limit_s(self, key: Key) -> float:
        """How long somebody may be silent."""
        is_stopped = key in self._stopped
        return self._limits.lost_after_s if is_stopped else self._limits.silent_lost_after_s

    def _judge(self, now: float, key: Key) -> LivenessVerdict[Key] | None:
        quiet = self._quiet[key]
        silent_s = now - quiet.since
        told = f"silent for {silent_s:.0f} s"
        if now >= quiet.since + self._limit_s(key):
            is_stopped = key in self._stopped
            words = f"stopped (SIGSTOP?), {told}" if is_stopped else told
            return LivenessVerdict(key, "lost", words, silent_s)
        if quiet.is_named or now < quiet.since + self._limits.lost_after_s:
            return None
        quiet.is_named = True
        how = "it is stopped" if key in self._stopped else "it may hold the interpreter lock"
        return LivenessVerdict(key, "silent", f"{told}; {how}", silent_s)
