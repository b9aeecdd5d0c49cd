"""Common to all collectives of values: arguments, one deadline for all waits, a meeting."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from shoal import settings
from shoal.arguments import integer
from shoal.errors import UsageError, UsageTypeError
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import JobClient
from shoal.runtime.rules.deadline import Allowance
from shoal.runtime.system import fault_points

_MOMENT_S = 0.01


class Deadline(NamedTuple):
    """One deadline for all waits of a call."""

    began: float
    timeout_s: float

    @property
    def left_s(self) -> float:
        """Seconds left; `arrive` rejects values that are not positive.

        At first it returns the original time-out unchanged: a loop then sends identical requests,
        which neither side has to parse again.
        """
        past_s = time.monotonic() - self.began
        if past_s < _MOMENT_S or not self.timeout_s > 0:
            return self.timeout_s
        return Allowance(max(self.timeout_s - past_s, 0.001), self.timeout_s)

    @property
    def is_over(self) -> bool:
        """Has it expired?"""
        return time.monotonic() - self.began >= self.timeout_s


def deadline_of(operation: str, name: object, timeout_s: object, lane: object) -> Deadline:
    """Check `name` and `lane`, and return the deadline.

    Raises:
      UsageError: one of them is wrong.
    """
    for argument, text in (("name", name), ("lane", lane)):
        if text is None and argument == "name":
            continue
        if not isinstance(text, str):
            raise UsageTypeError(f"{operation}: {argument}={text!r} must be a string")
        if not text:
            raise UsageError(f"{operation}: {argument} must not be empty")
    return Deadline(time.monotonic(), settings.timeout(operation, timeout_s, "SHOAL_TIMEOUT_S"))


def process_of(
    operation: str, argument: str, value: object, group: Group, num_processes: int
) -> int:
    """Return the job number of the process that an argument names within a group.

    Raises:
      UsageError: it is not an index, or names a process outside the job or the group.
    """
    process = integer(operation, argument, value, wanted="the index of a process")
    if not 0 <= process < num_processes:
        detail = f"the job has processes 0..{num_processes - 1}"
        raise UsageError(f"{operation}: {argument}={process} does not exist; {detail}")
    if process not in group.members:
        detail = f"is not among the processes {list(group.members)}"
        raise UsageError(f"{operation}: {argument}={process} {detail}; name one of them")
    return process


def meet_callers(
    client: JobClient,
    call: Call,
    payload: bytes,
    deadline: Deadline,
    lane: str,
    group: Group,
) -> Mapping[int, bytes]:
    """Meet all processes that make the same call; return their payloads. Raises as `agree`."""
    has_faults = fault_points.VARIABLE in os.environ  # checked once: this is on the fast path
    if has_faults:
        fault_points.reach(f"{call.operation}.before_arrive", client.process)
    answers = agree(client, call, payload, timeout_s=deadline.left_s, group=group.named, lane=lane)
    if has_faults:
        fault_points.reach(f"{call.operation}.after_arrive", client.process)
    return answers
