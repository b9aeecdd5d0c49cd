"""Whatever happens to one of three processes, or to a service: the others learn it, by name, soon.

    {SIGKILL, SIGSTOP, exception, sys.exit(3), cut link} x {process 0, another}
    {SIGKILL, SIGSTOP, cut link} x {the coordinator, JAX's service}

each while the others stand in a barrier, in a collective of XLA, or in plain Python with `step`,
on 1 and on 2 devices a process; and inside what moves or compares values: while all agree, while
values move over the devices or through the host's memory, while a difference is being found. There
each fault comes once in each place, to process 0 in one and to another in the next. A slice of it
runs with the suite, all of it by `make test-faults`.
"""

from __future__ import annotations

import itertools

import pytest

from faults.cells import FAILS, MIDSTS, PLACE, SERVICE, Cell, problems

FAULTS = ("kill", "stop", "raise", "exit", "cut")
WHERES = ("barrier", "collective", "step")
VALUES = ("broadcast", "allgather", "assert_same", *MIDSTS)


def cells(devices, services, wheres=WHERES, faults=FAULTS, victims=(0, 1, PLACE, SERVICE)):
    """Return the cells of a part of the matrix."""
    rows = itertools.product(wheres, faults, victims)
    return [
        Cell(devices, services, where, fault, victim)
        for where, fault, victim in rows
        if isinstance(victim, int) or fault not in FAILS
    ]


def alternating(wheres):
    """Return each fault in each place, the victims in turn."""
    return [
        Cell(2, "stand-alone", where, fault, pair[(i + j) % 2])
        for i, where in enumerate(wheres)
        for j, fault in enumerate(FAULTS)
        for pair in ((0, 1), (PLACE, SERVICE))
        if isinstance(pair[0], int) or fault not in FAILS
    ]


MATRIX = [
    *cells(1, "stand-alone"),
    *cells(2, "stand-alone"),
    *cells(2, "stand-alone", ["stream"], ["kill", "stop", "cut"], [0, 1]),
    # Who started the services is nobody special either.
    *cells(2, "process 0", victims=[0]),
    *cells(2, "process 0", faults=["kill"], victims=[PLACE, SERVICE]),
    *cells(2, "launcher", faults=["kill", "raise", "exit"], victims=[1]),
    *cells(2, "launcher", ["barrier"], ["stop"], [1]),
    *cells(2, "launcher", faults=["kill"], victims=[PLACE, SERVICE]),
    *alternating(VALUES),
]
SLICE = [
    Cell(2, "stand-alone", "barrier", "kill", 0),
    Cell(2, "stand-alone", "barrier", "stop", 1),
    Cell(2, "stand-alone", "barrier", "cut", 1),
    Cell(2, "stand-alone", "collective", "kill", 1),
    Cell(1, "process 0", "collective", "raise", 0),
    Cell(2, "process 0", "step", "kill", 0),
    Cell(2, "stand-alone", "step", "kill", PLACE),
    Cell(2, "stand-alone", "step", "kill", SERVICE),
    Cell(1, "stand-alone", "allgather", "stop", 0),
    Cell(2, "process 0", "chunks of broadcast", "kill", 1),
    Cell(1, "stand-alone", "pieces of broadcast", "stop", 1),
    Cell(1, "stand-alone", "difference", "raise", 1),
]


def test_matrix_has_each_fault_with_each_victim_and_place_of_the_value_cells():
    rows = [cell for cell in MATRIX if cell.where in VALUES]
    once = cells(2, "stand-alone", VALUES)
    assert {(one.fault, one.victim) for one in rows} == {(c.fault, c.victim) for c in once}
    assert {(one.where, one.victim) for one in rows} == {(c.where, c.victim) for c in once}
    assert {(one.where, one.fault) for one in rows} == {(c.where, c.fault) for c in once}


def marked(cell):
    marks = [pytest.mark.cuts] if cell.fault == "cut" else []
    return pytest.param(cell, id=str(cell), marks=marks)


@pytest.mark.parametrize("cell", [marked(cell) for cell in SLICE])
def test_a_slice(cell, told_of):
    assert not problems(cell, told_of(cell))


@pytest.mark.faults
@pytest.mark.parametrize("cell", [marked(cell) for cell in MATRIX])
def test_the_matrix(cell, told_of):
    assert not problems(cell, told_of(cell))
