"""Programs of collectives at random, with all that can go wrong in them, each from one seed.

A program is a list of operations that all processes make in the same order, and *faults*: at one
operation one process is late, interrupted, wrong, of another opinion, or gone. Whatever happens,
each call returns or raises by its deadline, on all or on none; no value of one operation passes for
that of another; and afterwards one point that all come to works among those who live.

*Wide* programs have lanes, threads and notices besides, each call has a name of its own, and a
process may make other calls than the rest. Then `live_processes` brings them together.
"""

import random
from typing import NamedTuple

import numpy as np

from shoal.collectives.allgather import allgather
from shoal.collectives.broadcast import broadcast
from shoal.collectives.live_processes import live_processes
from shoal.collectives.same import assert_same
from shoal.errors import ShoalError
from shoal.runtime.barrier import barrier
from shoal.runtime.preemption import clear, preempted
from shoal.runtime.rules.call_record import RecordedCall
from shoal.runtime.system.fault_points import InjectedError

KINDS = ("barrier", "barrier", "live", "broadcast", "large", "allgather", "many", "same", "rearm",
         "put")  # fmt: skip
BARE = ("barrier", "live")  # which may be asked for any group
POINTS = {
    "barrier": ("barrier.before_arrive", "barrier.after_arrive"),
    "broadcast": ("broadcast.before_arrive", "broadcast.after_arrive"),
    "large": ("broadcast.after_arrive", "stream.before_chunk", "stream.after_chunk"),
    "allgather": ("allgather.before_arrive", "allgather.after_arrive"),
    "many": ("allgather.after_arrive", "stream.before_chunk", "stream.after_chunk"),
    "same": ("assert_same.before_arrive", "assert_same.after_arrive"),
}
FAULTS = ("late", "late", "raise", "interrupt", "interrupt", "usage", "name", "kind", "group",
          "shape", "values", "deadline", "killed", "frozen", "failed", "exit")  # fmt: skip
DEADLY = ("killed", "frozen", "failed", "exit")
LONG_S = 1000.0
WIDE_KINDS = ("barrier", "barrier", "broadcast", "large", "allgather", "same", "put", "step")
# A call less than the others, one more, one in another lane or thread, or of another group.
APART = ("less", "more", "lane", "thread", "group")
WIDE_FAULTS = (*APART, *APART, "notice", "notice", *FAULTS)
OWN_ERRORS = (InjectedError, KeyboardInterrupt, ValueError)


class Operation(NamedTuple):
    """One call that all of `group` make."""

    kind: str
    name: str
    group: tuple[int, ...] | None
    timeout_s: float
    is_equal: bool  # for "same": do the values agree?
    lane: str = "main"


class Fault(NamedTuple):
    """What goes wrong on one process at one operation."""

    kind: str
    process: int
    at: int
    value: object = None


class Program(NamedTuple):
    """All of it; the same seed makes the same one."""

    seed: int
    processes: int
    operations: tuple[Operation, ...]
    faults: tuple[Fault, ...]
    is_wide: bool = False

    @property
    def has_deaths(self):
        return any(fault.kind in DEADLY for fault in self.faults)

    def in_lane(self, lane):
        """The operations of a lane, by their place in the program."""
        return [
            (at, operation)
            for at, operation in enumerate(self.operations)
            if operation.lane == lane
        ]

    def of(self, process, at):
        return [fault for fault in self.faults if (fault.process, fault.at) == (process, at)]


def program_of(seed, *, deadly=True, processes=None):
    """Return the program of a seed."""
    chance = random.Random(seed)
    processes = processes or chance.choice([2, 3, 3, 4])
    operations = [_operation(chance, processes) for _ in range(chance.randint(3, 8))]
    faults = []
    for _ in range(chance.choice([1, 1, 2, 2, 3, 4])):
        at = chance.randrange(len(operations))
        operation = operations[at]
        group = operation.group or range(processes)
        kind = chance.choice(FAULTS)
        if kind in DEADLY and not deadly:
            continue
        fault = _fault(chance, kind, chance.choice(list(group)), at, operation, processes)
        if fault is not None and any(_is_too_much(other, fault) for other in faults):
            continue
        if fault is not None:
            faults.append(fault)
        if fault is not None and kind == "group":  # it is known only when all have come
            operations[at] = operation._replace(timeout_s=LONG_S)
    return Program(seed, processes, tuple(operations), tuple(faults))


def wide_program_of(seed, *, deadly=True, faults=WIDE_FAULTS, processes=None):
    """Return the wide program of a seed."""
    chance = random.Random(f"wide {seed}")
    processes = processes or chance.choice([2, 3, 3, 4])
    operations = []
    for at in range(chance.randint(4, 9)):
        operation = _operation(chance, processes)
        lane = chance.choice(["main", "main", "main", "side"])
        kind = chance.choice(WIDE_KINDS)
        if kind in ("put", "step"):
            lane, operation = "main", operation._replace(group=None)
        operations.append(operation._replace(kind=kind, name=f"call {at}", lane=lane))
    chosen = []
    for _ in range(chance.choice([1, 1, 2, 2, 3, 4])):
        at, kind = chance.randrange(len(operations)), chance.choice(faults)
        operation = operations[at]
        process = chance.choice(list(operation.group or range(processes)))
        if kind in DEADLY and not deadly:
            continue
        fault = _wide_fault(chance, kind, process, at, operation, processes)
        if fault is not None and not any(_is_too_much(other, fault) for other in chosen):
            chosen.append(fault)
    return Program(seed, processes, tuple(operations), tuple(chosen), is_wide=True)


def _wide_fault(chance, kind, process, at, operation, processes):
    if kind == "notice":
        return Fault(kind, process, at)
    if operation.kind == "step":  # it meets no other; each has a deadline of its own
        return Fault(kind, process, at) if kind in DEADLY else None
    if kind == "group":
        rest = [p for p in range(processes) if p != process]
        some = chance.sample(rest, chance.randint(0 if processes == 2 else 1, len(rest)))
        group = tuple(sorted([process, *some]))
        if operation.kind == "same" and len(group) == 1:
            return None  # whose values agree with themselves
        is_same = group == (operation.group or tuple(range(processes)))
        return None if operation.kind == "put" or is_same else Fault(kind, process, at, group)
    if kind in APART:
        return None if operation.kind == "put" else Fault(kind, process, at)
    if operation.lane != "main" and kind in ("raise", "interrupt", *DEADLY):
        return None  # they happen to the first thread of a process
    if kind == "kind":
        kind = "name"  # `live_processes` has no name
    fault = _fault(chance, kind, process, at, operation, processes)
    if fault is not None and fault.kind == "usage":  # it would be a call of the main lane, of all
        fault = None if operation.lane != "main" else fault._replace(value="timeout_s")
    return fault


def _is_too_much(one, other):
    """One opinion of a process at a time, and one other group of an operation."""
    return one.at == other.at and (
        one.process == other.process or one.kind == other.kind == "group"
    )


def _operation(chance, processes):
    kind = chance.choice(KINDS)
    group = None
    if kind != "rearm" and processes > 2 and chance.random() < 0.3:
        group = tuple(sorted(chance.sample(range(processes), chance.randint(2, processes - 1))))
    name = chance.choice(["a", "b", "live"])
    return Operation(kind, name, group, chance.choice([2.0, 5.0, 100.0]), chance.random() < 0.7)


def _fault(chance, kind, process, at, operation, processes):
    if kind == "late":
        return Fault(kind, process, at, chance.choice([1.0, 3.0, 7.0]))
    if kind == "raise":
        if operation.kind not in POINTS:
            return None
        error = chance.choice([InjectedError, KeyboardInterrupt, ValueError])
        point = chance.choice(POINTS[operation.kind])
        return Fault(kind, process, at, (point, chance.choice([1, 1, 2]), error))
    if kind == "interrupt":
        return Fault(kind, process, at, chance.choice([0.0, 0.5, 4.0]))
    if kind == "usage":
        # A list of processes that is wrong does not say whose call it is: then it is that of all.
        more = ["processes"] if operation.group is None else []
        return Fault(kind, process, at, chance.choice(["timeout_s", "lane", *more]))
    if kind == "group":
        rest = [p for p in range(processes) if p != process]
        if operation.kind not in BARE or operation.group is not None or processes == 2:
            return None
        some = chance.sample(rest, chance.randint(1, processes - 2))
        return Fault(kind, process, at, tuple(sorted([process, *some])))
    if kind == "deadline":
        return Fault(kind, process, at, chance.choice([1.0, 6.0]))
    if (kind == "values") != (operation.kind == "put") and kind not in DEADLY:
        return None  # a call that waits for no other cannot fail, but on its arguments
    return Fault(kind, process, at)


class Gone(BaseException):
    """The process is no more."""


class Ended(NamedTuple):
    """How one call ended."""

    at: int
    took_s: float
    timeout_s: float
    error: BaseException | None
    is_own: bool  # did the process itself, alone, make it fail?


def perform(client, operation, at, faults, *, large=100_000):
    """Make one call; return whether what came back is right."""
    operation, size, more = _disturbed(operation, faults)
    kind, name, group, _, is_equal, _ = operation
    size += large if kind in ("large", "many") else 5
    me, members = client.process, group or range(client.num_processes)
    if kind == "put":
        client.call_records.record(_entry(at, faults), group=group, lane="main")
    elif kind == "step":
        return preempted.on(client, at, timeout_s=more["timeout_s"]) in (True, False)
    elif kind == "rearm":
        clear.on(client, timeout_s=more["timeout_s"])
    elif kind == "barrier":
        barrier.on(client, name, processes=group, **more)
    elif kind == "live":
        live_processes.on(client, processes=group, **more)
    elif kind in ("broadcast", "large"):
        source = members[at % len(members)]
        value = np.full(size, at + 1 if me == source else 0, np.uint8)
        got = broadcast.on(client, value, source, processes=group, name=name, **more)
        return bool((got == at + 1).all())
    elif kind in ("allgather", "many"):
        value = np.full(size, 16 * at + me, np.uint8)
        rows = allgather.on(client, value, processes=group, name=name, **more)
        return bool((rows == 16 * at + np.array(members)[:, None]).all())
    else:
        value = np.full(size, 0 if is_equal else me, np.uint8)
        assert_same.on(client, value, processes=group, name=name, **more)
        return is_equal
    return True


def _entry(at, faults):
    """Return what a call of `put` leaves in the call record."""
    values = f"{at} of another opinion" if any(f.kind == "values" for f in faults) else f"{at}"
    return RecordedCall("put", "train.py:1 (main)", ("w: float32[8]",), values)


def _disturbed(operation, faults):
    """Return what a process makes of an operation: it, how much longer its values are, options."""
    kind, name, group, timeout_s, is_equal, lane = operation
    more, longer = {"timeout_s": timeout_of(operation, faults)}, 0
    if lane != "main":
        more["lane"] = lane
    for fault in faults:
        if fault.kind == "usage" and fault.value == "lane":
            more["lane"] = ""
        elif fault.kind == "usage" and fault.value == "processes" and kind in BARE:
            group = (0, 99)
        elif fault.kind == "usage":
            more["timeout_s"] = -1.0
        elif fault.kind == "name":
            name += " of another opinion"
        elif fault.kind == "kind":
            kind, name = ("barrier", "live") if kind == "live" else ("live", name)
        elif fault.kind == "group":
            group = fault.value
        elif fault.kind == "shape":
            longer = 1
        elif fault.kind in ("lane", "thread"):
            more["lane"] = "aside"
    return Operation(kind, name, group, timeout_s, is_equal, lane), longer, more


def timeout_of(operation, faults):
    """Return the deadline that the process gives, seconds."""
    given = [fault.value for fault in faults if fault.kind == "deadline"]
    return min([operation.timeout_s, *given])


def agree_at_last(client, program, *, timeout_s=LONG_S):
    """Meet at one point; after a loss the survivors find each other first, and again if some of
    them already had."""
    if not program.has_deaths:
        try:
            barrier.on(client, "at last", timeout_s=LONG_S)
        except ShoalError:
            if not any(fault.kind in ("group", "values") for fault in program.faults):
                raise
            # A process that names another group may wait until the others come to a point of all;
            # other values are known where all meet next.
            barrier.on(client, "at last, again", timeout_s=LONG_S)
        return
    attempts = most_attempts(program)
    for attempt in range(attempts):
        try:
            alive = live_processes.on(client, timeout_s=timeout_s)
            barrier.on(client, "at last", processes=alive, timeout_s=timeout_s)
            return
        except ShoalError:
            if attempt == attempts - 1:
                raise


def most_attempts(program):
    """The number of calls of `live_processes` of which the last returns: one for each call that
    another process may have made more."""
    return 2 * len(program.operations) + 4


def come_together(client, program, lane, *, timeout_s=LONG_S):
    """Call `live_processes` until it returns, and then two points; return how the first ended."""
    attempts = most_attempts(program)
    for attempt in range(attempts):
        try:
            live_processes.on(client, lane=lane, timeout_s=timeout_s)
            break
        except ShoalError:
            if attempt == attempts - 1:
                raise
    try:
        barrier.on(client, "at last", lane=lane, timeout_s=timeout_s)
        end = "met"
    except ShoalError as error:  # calls that send nothing differ, which is known here
        end = repr(error)
    value = np.arange(5) if client.process == 0 else np.zeros(5, int)
    got = broadcast.on(client, value, 0, name="at last", lane=lane, timeout_s=timeout_s)
    assert (got == np.arange(5)).all()
    return end


def wide_findings(program, endings, lasts):
    """Return what else is wrong with a wide program; `lasts`: what each `come_together` returned,
    by process and lane."""
    problems = []
    for at, operation in enumerate(program.operations):
        rows = {p: call for p, ended in endings.items() for call in ended if call.at == at}
        met = [p for p, call in rows.items() if call.error is None]
        members = operation.group or range(program.processes)
        is_met = any(not {f.kind for f in program.of(p, at)} & {*APART} for p in met)
        if operation.kind in ("put", "step") or program.has_deaths or not is_met:
            continue
        problems += [
            f"operation {at}: {rows[p].error!r} on process {p}, success on {met}"
            for p in members
            if p not in met and not (p in rows and rows[p].is_own)
        ]
    for lane in {lane for _, lane in lasts}:
        ends = [ends for (_, each), ends in lasts.items() if each == lane]
        if "met" in ends and {*ends} != {"met"}:
            problems.append(f"lane {lane!r}: {ends}")
    return problems


def findings(program, endings, lasts):
    """Return what is wrong: `endings` and `lasts` by process; None: it did not live to see it."""
    problems = []
    for process, ended in endings.items():
        for call in ended:
            limit_s = call.timeout_s + 10.0 if call.timeout_s > 0 else 0.0
            if call.took_s > limit_s:
                problems.append(f"process {process}, operation {call.at}: took {call.took_s} s")
    if not program.has_deaths and not program.is_wide:
        for at in range(len(program.operations)):
            rows = [call for ended in endings.values() for call in ended if call.at == at]
            if any(call.error is None for call in rows):
                problems += [
                    f"operation {at}: {call.error!r} on one process, success on another"
                    for call in rows
                    if call.error is not None and not call.is_own
                ]
    problems += [
        f"process {process}: the point at last: {last!r}"
        for process, last in lasts.items()
        if isinstance(last, BaseException)
    ]
    return problems
