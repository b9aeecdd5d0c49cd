"""Every environment variable of shoal, with its unit, default and meaning.

Read when needed, never at import, so that a test or a launcher may set them at any time. An
explicit argument always takes precedence. The reference page lists `SETTINGS`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from shoal.arguments import seconds as duration
from shoal.errors import UsageError, nearest, raise_all

__all__ = [
    "SETTINGS",
    "Setting",
    "check_all",
    "is_set",
    "number",
    "seconds",
    "text",
    "timeout",
    "unknown_variables",
]


class Setting(NamedTuple):
    """One variable: its name, default (as text; "" means unset), unit and meaning."""

    name: str
    default: str
    unit: str
    meaning: str


_ROWS = (
    # identity (set by `shoal run`, or by you)
    ("SHOAL_COORDINATOR", "", "host:port", "the coordinator of the job"),
    ("SHOAL_RENDEZVOUS", "", "folder", "shared by all hosts, in which process 0 publishes the "
     "coordinator; for launchers that pass no address"),
    ("SHOAL_JAX_SERVICE", "", "host:port", "JAX's coordination service, if already running"),
    ("SHOAL_NUM_PROCESSES", "", "processes", "number of processes of the job"),
    ("SHOAL_PROCESS_ID", "", "index", "index of this process, from 0"),
    ("SHOAL_TOKEN", "", "text", "the job's secret; both ends of each connection prove that they "
     "have it"),
    ("SHOAL_INSECURE", "0", "0 or 1", "1, on all processes: the job starts without a token, and "
     "anyone who can reach its coordinator can join"),
    ("SHOAL_JOB", "", "text", "the name of the job, which `ps` shows with shoal's own processes "
     "(set by `shoal run`); not set: the address of the coordinator"),
    ("SHOAL_ATTEMPT", "0", "number", "of this attempt of `shoal run --max-restarts`, from 0"),
    ("SHOAL_PROGRESS_FILE", "", "file", "in which a process of `shoal run` notes its step"),
    ("SHOAL_RECORD_FILE", "", "PID:FILE", "in which a process of `shoal run` records its failure"),
    ("SHOAL_FAILURE_FILE", "", "file", "in which a process writes the facts of a failure of its "
     "job (failure.json), under other launchers than `shoal run`"),
    ("SHOAL_MEMBER", "", "text", "set by `initialize` for the children of its process: they are no "
     "members"),
    ("SHOAL_LAUNCHED", "", "text", "set by `shoal run` and `initialize` for the children of a "
     "process: checksums of its launchers' variables"),
    ("SHOAL_REPORTED", "", "names", "set by `shoal run`: variables that do not exist, which it has "
     "reported"),
    ("SHOAL_VIRTUAL_DEVICES", "", "devices", "virtual CPU devices per process; forces CPU"),
    # time limits
    ("SHOAL_INITIALIZE_TIMEOUT_S", "300", "seconds", "time limit for all processes to join"),
    ("SHOAL_TIMEOUT_S", "600", "seconds", "default deadline of a wait"),
    ("SHOAL_WARN_AFTER_S", "10", "seconds", "a wait this long logs the missing processes"),
    ("SHOAL_HEARTBEAT_S", "2", "seconds", "interval between heartbeats of a process"),
    ("SHOAL_LOST_AFTER_S", "10", "seconds", "a process that is stopped or unreachable this long "
     "is lost; inf: never"),
    ("SHOAL_SILENT_LOST_AFTER_S", "60", "seconds", "a process that runs but sends no heartbeats "
     "this long (its interpreter lock is held) is lost; inf: never"),
    ("SHOAL_HANG_TIMEOUT_S", "30", "seconds", "a process stuck in native code after a peer was "
     "lost, or has made other calls, is ended; inf: never"),
    ("SHOAL_STALL_WARN_S", "300", "seconds", "a job in which no process has made progress for this "
     "long is reported, with the call site of each; inf: never"),
    ("SHOAL_STALLED_AFTER_S", "inf", "seconds", "the same, in which no process does anything, is "
     "ended with 77; inf: never"),
    ("SHOAL_FAILURE_GRACE_S", "3", "seconds", "from the first failure in a job until the other "
     "processes get SIGTERM; not set: 0.2 if a new attempt follows, except for a running save"),
    ("SHOAL_GRACE_S", "10", "seconds", "between SIGTERM and SIGKILL when a job is ended"),
    ("SHOAL_PREEMPTION_GRACE_S", "300", "seconds", "the same for processes that took SIGTERM as a "
     "preemption notice, to save and exit"),
    # storage
    ("SHOAL_SAVE_LEASE_S", "60", "seconds", "a save that was not refreshed for this long is stale, "
     "and others may end it; a running save is refreshed several times as often"),
    ("SHOAL_COMPILE_CACHE", "", "0, 1 or folder", "where the programs that JAX compiles are kept "
     "for the next start; 1: in the user's cache directory; 0: nowhere; `shoal run` sets it to 1 "
     "with --max-restarts or --restart-preempted"),
    ("SHOAL_CACHE_SUSPECT_SINCE", "", "number", "set by `shoal run` once a process has crashed in "
     "code that may be from the compile cache: the time, in seconds since the epoch, since which "
     "entries are removed; there is no cache then"),
    # values
    ("SHOAL_STRICT_DTYPES", "0", "0 or 1", "1: a host value whose dtype arrays on devices "
     "cannot have, such as float64, is an error; 0: it is narrowed"),
    ("SHOAL_SHARED_MEMORY", "1", "0 or 1", "large values between processes of one host go through "
     "its memory; 0: over the devices, as between hosts"),
    ("SHOAL_TOPOLOGY", "", "text", "what the job's CPU devices stand for, such as `v5e:4x4`: "
     "make_mesh orders them as it orders the devices of that hardware"),
    # output
    ("SHOAL_QUIET", "0", "0 or 1", "1: `log` prints nothing"),
    # errors
    ("SHOAL_TRACEBACK", "short", "short or full", "whether tracebacks of errors that shoal raises "
     "show its own frames, and stacks its own threads"),
    # for tests
    ("SHOAL_FAULTS", "", "text", "faults injected at named points (barrier.before_arrive@1:kill), "
     "see shoal.runtime.system.fault_points"),
    ("SHOAL_BENCH_MARK", "", "text", "set by shoal.testing for the processes that it starts, by "
     "which it finds those that are left"),
)  # fmt: skip

SETTINGS: Mapping[str, Setting] = {row[0]: Setting(*row) for row in _ROWS}

_COUNTS = ("processes", "index", "number", "devices")  # units of whole numbers
_PREFIX = "SHOAL_"
# By the new name, the name of 0.1: it is read where the new one is not set, with a warning.
_OLD_NAMES = {
    "SHOAL_HANG_TIMEOUT_S": "SHOAL_ABORT_AFTER_S",
    "SHOAL_PREEMPTION_GRACE_S": "SHOAL_LEAVE_S",
    "SHOAL_SAVE_LEASE_S": "SHOAL_LEASE_S",
    "SHOAL_SHARED_MEMORY": "SHOAL_HOST_MEMORY",
}
# The words of other launchers, which are not close to ours.
_OTHER_WORDS = {
    "SHOAL_MASTER_ADDR": "SHOAL_COORDINATOR",
    "SHOAL_PROCESS_COUNT": "SHOAL_NUM_PROCESSES",
    "SHOAL_RANK": "SHOAL_PROCESS_ID",
    "SHOAL_WORLD_SIZE": "SHOAL_NUM_PROCESSES",
}


def text(name: str) -> str:
    """Return the variable's text, or its default. Unknown names are a bug: KeyError."""
    return _given(name) or SETTINGS[name].default


def is_set(name: str) -> bool:
    """Return whether the variable is set. Unknown names are a bug: KeyError."""
    return bool(_given(name))


def _given(name: str) -> str:
    value, old = os.environ.get(SETTINGS[name].name, "").strip(), _OLD_NAMES.get(name, "")
    if value or not old:
        return value
    value = os.environ.get(old, "").strip()
    if value:
        warnings.warn(f"{old} is deprecated: it is now {name}", FutureWarning, stacklevel=3)
    return value


def number(name: str) -> int | None:
    """Return a count or an index, or None when unset.

    Raises:
      UsageError: it is not an integer, or negative.
    """
    value = text(name)
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise _bad(name, value, "a whole number, not negative")
    return int(value)


def seconds(name: str) -> float:
    """Return a duration in seconds; `inf` is allowed.

    Raises:
      UsageError: it is not a number, or not positive.
    """
    value = text(name)
    try:
        duration = float(value)
    except ValueError:
        duration = math.nan
    if not duration > 0:
        raise _bad(name, value, "a positive number of seconds")
    return duration


def check_all() -> None:
    """Check the values of all numeric variables, including those that nothing reads yet.

    Raises:
      UsageError: one is not a number, or not positive where required; all problems at once.
    """
    problems = []
    for setting in SETTINGS.values():
        try:
            if setting.unit == "seconds":
                seconds(setting.name)
            elif setting.unit == "0 or 1" and number(setting.name) not in (0, 1):
                raise _bad(setting.name, text(setting.name), "0 or 1")
            elif setting.unit == "short or full" and text(setting.name) not in ("short", "full"):
                raise _bad(setting.name, text(setting.name), "short or full")
            elif setting.unit in _COUNTS:
                number(setting.name)
        except UsageError as error:
            problems.append(str(error))
    raise_all("initialize", problems)


def unknown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return a line for each variable that begins with SHOAL_ and does not exist, by its name.

    Their values are not shown: one of them may be a token. Those that a launcher has reported are
    left out.

    >>> unknown_variables({"SHOAL_NPROCS": "4"})["SHOAL_NPROCS"]
    "shoal has no variable SHOAL_NPROCS; did you mean 'SHOAL_NUM_PROCESSES'?"
    """
    lines, reported = {}, env.get("SHOAL_REPORTED", "").split(",")
    known = {*SETTINGS, *_OLD_NAMES.values(), *reported}
    for name in sorted(env):
        is_set = name.startswith(_PREFIX) and env[name].strip()
        if not is_set or name in known or _is_of_a_service(name, env):
            continue
        meant = _OTHER_WORDS.get(name.upper(), name.upper())
        hint = nearest(meant, SETTINGS, prefix=_PREFIX)
        lines[name] = f"shoal has no variable {name}{hint}"
    return lines


def _is_of_a_service(name: str, env: Mapping[str, str]) -> bool:
    """Return whether Kubernetes sets it, for a service called `shoal…`, in the namespace's pods."""
    services = [
        variable.removesuffix("_SERVICE_HOST")
        for variable in env
        if variable.endswith("_SERVICE_HOST")
    ]
    starts = [f"{service}_{kind}_" for service in services for kind in ("SERVICE", "PORT")]
    return f"{name}_".startswith(tuple(starts))


def timeout(caller: str, timeout_s: object, name: str, argument: str = "timeout_s") -> float:
    """Return the `timeout_s` of a call, or for None the setting `name`, in seconds.

    Raises:
      UsageError: `timeout_s` is not a positive number.
    """
    if timeout_s is None:
        return seconds(name)
    problems: list[str] = []
    limit_s = duration(argument, timeout_s, problems)
    raise_all(caller, problems)
    return limit_s


def _bad(name: str, value: str, wanted: str) -> UsageError:
    meaning = SETTINGS[name].meaning
    return UsageError(f"environment variable {name}={value!r} ({meaning}) must be {wanted}")
