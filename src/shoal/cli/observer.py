"""Find a running job, and query its coordinator. An observer only reads, or requests a save.

The address of a job: `host:port` of its coordinator, or the `job.json` that `shoal run` keeps
beside the logs while the job runs.
"""

from __future__ import annotations

import glob
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal import settings
from shoal.draw.roll import Roll, ServiceRow
from shoal.errors import DeadlineError, InitializeError, ProcessLostError, ShoalError, UsageError
from shoal.paths import local_path
from shoal.runtime.failures.program_text import program_lines
from shoal.runtime.rules.point import Member
from shoal.runtime.rules.programs import differences_of
from shoal.runtime.startup.job_token import observed_tokens
from shoal.runtime.wire.connection import Channel, UnknownNameError, connect
from shoal.runtime.wire.frames import Frame, FrameError, pack_frame, split_address
from shoal.runtime.wire.proof import introduce

ANSWER_S = 10.0  # a coordinator that does not answer within this is frozen or cut off
_MAX_ANSWER_BYTES = 1 << 30  # the stacks of 10,000 processes
_FILE = "job.json"
_MOST_QUERIED = 1000  # processes in one query, whose size is limited


class ServerAddress(NamedTuple):
    """A coordinator, and the token that it has, or those that it may have."""

    address: str
    tokens: tuple[str, ...]
    logs: str = ""  # the directory of its job.json; empty: unknown


class _JobFile(NamedTuple):
    """The content of a `job.json`."""

    path: str
    place: ServerAddress
    launcher: int  # its pid


def find(command: str, where: str | None, token: str | None) -> ServerAddress:
    """Return the coordinator to observe.

    Args:
      command: the command, for messages.
      where: host:port, a directory with a job.json, or such a file; None: SHOAL_COORDINATOR, else
        the only running job of this user on this host.
      token: None: that of job.json, else SHOAL_TOKEN, else the one that `initialize` would find.

    Raises:
      UsageError: there is no such place, or it is ambiguous.
    """
    where = where or settings.text("SHOAL_COORDINATOR")
    if where.startswith("~"):
        where = local_path(where, f"{command}: {where!r}")
    if not where:
        place = _only_job(command)
    elif os.path.isdir(where):
        path = os.path.join(where, _FILE)
        if not os.path.exists(path):
            reason = f"no job is running, or not its log directory: it has no {_FILE}"
            raise UsageError(f"{command}: {where!r}: {reason}")
        place = _read(command, path).place
    elif os.path.exists(where):
        place = _read(command, where).place
    else:
        address, given = _address(command, where), settings.text("SHOAL_TOKEN")
        place = ServerAddress(address, (given,) if given else observed_tokens(address))
    return place if token is None else place._replace(tokens=(token,))


def _address(command: str, where: str) -> str:
    try:
        split_address(where)
    except UsageError:
        reason = "is neither host:port of a coordinator nor a directory or file"
        raise UsageError(f"{command}: {where!r} {reason}") from None
    return where


def _only_job(command: str) -> ServerAddress:
    """Return the only running job of this user on this host."""
    records = {}
    temporary = os.path.join(glob.escape(tempfile.gettempdir()), "shoal-run-*")
    for folders in (os.curdir, "*", temporary):
        for path in glob.glob(os.path.join(folders, _FILE)):
            record = _running(path)
            if record is not None:
                records[record.place.address] = record
    if len(records) == 1:
        return next(iter(records.values())).place
    options = "pass host:port of a coordinator, or the log directory of shoal run"
    if not records:
        raise UsageError(f"{command}: no running job of shoal run is found here; {options}")
    paths = sorted(os.path.dirname(record.path) for record in records.values())
    listed = "".join(f"\n  - shoal {command} {path}" for path in paths)
    raise UsageError(f"{command}: {len(paths)} jobs are running here; choose one:{listed}")


def _running(path: str) -> _JobFile | None:
    """Return the content of a file if it is this user's and its job is running."""
    try:
        if os.stat(path).st_uid != os.getuid():
            return None  # another user's, who must not receive the token
        record = _read("", path)
    except (OSError, UsageError):
        return None
    return record if _is_alive(record.launcher) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _read(command: str, path: str) -> _JobFile:
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        logs = os.path.dirname(os.path.abspath(path))
        place = ServerAddress(str(record["coordinator"]), (str(record["token"]),), logs)
        launcher = int(record["launcher"])
    except OSError as error:
        raise UsageError(f"{command}: {path!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        reason = "has no address of a job: it is not a job.json of shoal run"
        raise UsageError(f"{command}: {path!r} {reason}") from None
    return _JobFile(os.path.abspath(path), place, launcher)


class Observer:
    """A connection to a coordinator from outside the job, with one small query at a time."""

    def __init__(self, command: str, place: ServerAddress, *, answer_s: float = ANSWER_S) -> None:
        """Connect.

        Raises:
          InitializeError: nothing listens there, it is not a coordinator, or the token is wrong.
          DeadlineError: it does not answer within `answer_s`.
        """
        self.place = place
        self._command = command
        self.answer_s = answer_s
        self._ticket = 0
        self._queried_at = math.inf  # when the pending query was sent
        limit = time.monotonic() + answer_s
        answers = []
        for token in place.tokens:
            self._channel = _connected(command, place, limit)
            try:
                answers.append(self._introduce(token, limit))
            except BaseException:
                self.close()
                raise
            if not answers[-1]:
                return
            self.close()
        raise InitializeError(f"{self._name()} answered: {answers[0]}")

    def _introduce(self, token: str, limit: float) -> str:
        """Return the refusal of the coordinator; "" if there is none."""
        try:
            refusal = introduce(self._channel, {"do": "observe"}, token, limit)
            welcome = refusal or self._channel.receive(limit)
        except TimeoutError:
            raise self._late() from None
        except (OSError, FrameError) as error:
            reason = f"what listens at {self.place.address} is not a coordinator of this shoal"
            raise InitializeError(f"{self._command}: {reason} ({error})") from None
        if welcome.header.get("is") == "welcome":
            return ""
        return welcome.body.decode(errors="replace") or "a refusal without words"

    def waits_s(self) -> float:
        """Return the age of a pending query, seconds; 0 if there is none."""
        return max(0.0, time.monotonic() - self._queried_at)

    def query(self) -> None:
        """Query the members, unless a query is pending."""
        if self._queried_at == math.inf:
            self._put({"do": "members"})

    def answer(self, limit: float) -> Roll | None:
        """Return the answer, or None at the time `limit` of the monotonic clock.

        Raises:
          ProcessLostError: the coordinator is gone.
        """
        frame = self._receive(limit)
        return None if frame is None else self._roll(frame)

    def roll(self) -> Roll:
        """Query the members and return the answer.

        Raises:
          DeadlineError: there was none in time.
          ProcessLostError: the coordinator is gone.
        """
        self.query()
        roll = self.answer(time.monotonic() + self.answer_s)
        if roll is None:
            raise self._late()
        return roll

    def stacks(self, processes: Sequence[int] | None = None) -> dict[int, str]:
        """Return the stacks of all threads of `processes` (None: all), as far as they answer.

        Raises as `roll` does.
        """
        if processes is None:
            return self._stacks(None)
        stacks: dict[int, str] = {}
        for begin in range(0, len(processes), _MOST_QUERIED):
            stacks |= self._stacks(processes[begin : begin + _MOST_QUERIED])
        return stacks

    def _stacks(self, processes: Sequence[int] | None) -> dict[int, str]:
        self._put({"do": "stacks", "processes": processes})
        frame = self._receive(time.monotonic() + self.answer_s)
        if frame is None:
            raise self._late()
        stacks = self._body(frame).get("stacks", {})
        return {int(process): str(text) for process, text in stacks.items()}

    def request_save(self, *, then_stops: bool) -> None:
        """Request a save of the job; with `then_stops`, as a preemption notice."""
        self._put({"do": "save", "then_stops": then_stops})

    def save_state(self, within_s: float) -> dict[str, Any] | None:
        """Return what has become of the requested save, at its next change; None: none in time.

        Raises:
          ProcessLostError: the coordinator is gone.
        """
        frame = self._receive(time.monotonic() + within_s)
        return None if frame is None else self._body(frame)

    def awaited(self) -> list[int]:
        """Return the processes that have not answered an open request, or notice.

        Raises as `roll` does.
        """
        self._put({"do": "awaited"})
        frame = self._receive(time.monotonic() + self.answer_s)
        if frame is None:
            raise self._late()
        return [int(process) for process in self._body(frame).get("awaited", ())]

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _put(self, question: dict[str, Any]) -> None:
        self._ticket += 1
        self._queried_at = now = time.monotonic()
        try:
            self._channel.send(
                pack_frame({**question, "ticket": self._ticket}), now + self.answer_s
            )
        except TimeoutError:
            raise self._late() from None
        except OSError as error:
            raise self._lost(error) from None

    def _receive(self, limit: float) -> Frame | None:
        try:
            while True:
                frame = self._channel.receive(limit)
                if frame.header.get("ticket") == self._ticket:
                    self._queried_at = math.inf
                    return frame
        except TimeoutError as error:
            if time.monotonic() < limit:  # the kernel found the link dead
                raise self._lost(error) from None
            return None
        except OSError as error:
            raise self._lost(error) from None
        except FrameError as error:
            raise self._strange(error) from None

    def _roll(self, frame: Frame) -> Roll:
        answer = self._body(frame)
        try:
            members = tuple(Member(*row) for row in answer["members"])
            services = tuple(ServiceRow(*row) for row in answer.get("services", ()))
            programs = tuple(program_lines(differences_of(answer.get("programs", [[], 0]))))
        except (KeyError, TypeError, FrameError) as error:
            raise self._strange(error) from None
        return Roll(self.place.address, members, services, programs)

    def _body(self, frame: Frame) -> dict[str, Any]:
        try:
            body = json.loads(frame.body)
        except ValueError as error:
            raise self._strange(error) from None
        if not isinstance(body, dict):
            raise self._strange("no object")
        return body

    def _lost(self, error: object) -> ProcessLostError:
        return ProcessLostError(f"{self._name()} is gone ({error})")

    def _late(self) -> DeadlineError:
        reason = f"has not answered for {self.answer_s:g} s: frozen or disconnected"
        return DeadlineError(f"{self._name()} {reason}", waited_s=self.answer_s)

    def _strange(self, error: object) -> ShoalError:
        reason = f"sent an answer that this shoal does not understand: {error}; another version?"
        return InitializeError(f"{self._name()} {reason}")

    def _name(self) -> str:
        return f"{self._command}: the coordinator at {self.place.address}"


def _connected(command: str, place: ServerAddress, limit: float) -> Channel:
    try:
        address = split_address(place.address)
        return connect(address, limit, max_body_bytes=_MAX_ANSWER_BYTES)
    except UnknownNameError as error:
        raise InitializeError(f"{command}: {error}") from None
    except OSError as error:
        reason = f"no answer from {place.address} ({error}); is the job over?"
        raise InitializeError(f"{command}: {reason}") from None
