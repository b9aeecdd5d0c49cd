"""What is wrong with a bucket, found before a job needs it: rights, conditions, clock."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.checkpoint.bucket.address import Bucket, objects_of
from shoal.checkpoint.bucket.object_store import check_conditions
from shoal.checkpoint.store.step_names import new_attempt, temporary_name
from shoal.errors import CheckpointError, StorageError

_CLOCK_OFF_S = 60.0  # S3 refuses requests that are signed 15 minutes off
_BYTES = b"shoal" * 100

LIFECYCLE = "abort incomplete multipart uploads after 7 days"  # the rule that a bucket should have


class Problem(NamedTuple):
    """What is wrong, and what to do."""

    words: str
    advice: str


class Examination(NamedTuple):
    """What was found."""

    facts: dict[str, Any]
    problems: list[Problem]


def examine(bucket: Bucket) -> Examination:
    """Try all that a save, a restore and retention need, with one small object, which is removed.

    What needs an earlier step that failed is not tried.
    """
    objects, name = objects_of(bucket), temporary_name(new_attempt())
    facts: dict[str, Any] = {"credentials": bucket.credentials, "lifecycle": LIFECYCLE}
    problems: list[Problem] = []

    def tried(right: str, act: Callable[[], object]) -> Exception | None:
        try:
            act()
        except (CheckpointError, OSError) as error:
            problem, _, advice = str(error).replace(f"/{name}", "").partition("\n")
            if isinstance(error, FileNotFoundError):
                problem = f"{bucket.url}: what was just written is not there ({right})"
            problems.append(Problem(problem, "; ".join(advice.split("\n"))))
            return error
        facts.setdefault("rights", []).append(right)
        return None

    def read() -> None:
        if objects.read(name)[0] != _BYTES:
            raise StorageError(f"{bucket.url}: what was written is not what is read")
        _check_clock(facts, problems, objects.info(name).modified_s - time.time())

    unlisted = tried("list", objects.listed)
    if isinstance(unlisted, StorageError) and unlisted.errno == errno.ENOENT:
        return Examination(facts, problems)
    if tried("write", lambda: objects.put(name, _BYTES)):
        return Examination(facts, problems)

    if not (
        tried("read", read) or tried("conditions of writes", lambda: check_conditions(objects))
    ):
        facts["conditions"] = "kept"
    tried("delete", lambda: objects.remove([name]))
    return Examination(facts, problems)


def _check_clock(facts: dict[str, Any], problems: list[Problem], ahead_s: float) -> None:
    facts["clock_ahead_s"] = ahead_s
    if abs(ahead_s) > _CLOCK_OFF_S:
        problem = f"the clock of the bucket is {ahead_s:+.0f} s from that of this host"
        problems.append(Problem(problem, "synchronize this host (chrony, ntpd)"))
