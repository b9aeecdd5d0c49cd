"""Programs that only some processes have compiled: found where one lacks them, and nowhere else."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.client.programs import ProgramNotes, program_of
from shoal.runtime.failures.program_text import program_lines
from shoal.runtime.job_status import JobStatus
from shoal.runtime.rules.messages import programs_of
from shoal.runtime.rules.programs import (
    MOST_GROUPS,
    MOST_PROGRAMS,
    MOST_SENT,
    CompiledProgram,
    Differences,
    Noted,
    ProgramDifference,
    ProgramSets,
    differences_of,
    noted_rows,
)
from shoal.runtime.wire.frames import FrameError

ALONE = "process 0 alone has compiled"


def program(number: int, *, name: str = "", site: str = "train.py:3 (main)") -> CompiledProgram:
    return CompiledProgram(f"d{number}", name or f"jit(f{number})", "f32[8]", 4, site)


class Job:
    """Processes that note and meet, and a coordinator that takes their heartbeats from the wire."""

    def __init__(self, num_processes: int) -> None:
        self.notes = [ProgramNotes(num_processes) for _ in range(num_processes)]
        for notes in self.notes:
            notes.is_noting = True
        self.sets = ProgramSets(num_processes)

    def compile(self, process: int, number: int, owners: tuple[int, ...] = (), **more: str) -> None:
        self.notes[process].note(owners or range(len(self.notes)), program(number, **more))

    def meet(self, group: tuple[int, ...] | None = None) -> None:
        for process in range(len(self.notes)) if group is None else group:
            self.notes[process].meet(group)

    def beat(self, *processes: int) -> bool:
        counts = False
        for process in processes or range(len(self.notes)):
            rows = json.loads(json.dumps(noted_rows(self.notes[process].beat())))
            noted = programs_of({"programs": rows}, process, len(self.notes))
            counts |= self.sets.receive(process, noted)
        return counts


ALONE_ROW = [["d", "jit(f)", "f32[8]", 2, "a.py:1"], [[0, 0]], [[1, 1]], [[0, 1]], None]


def lines(job, **more):
    """Return the differences in words, once they have been sent."""
    differences = job.sets.differences(**more)
    assert differences_of(json.loads(json.dumps(differences))) == differences
    return program_lines(differences)


def test_difference_is_reported_once_after_two_synchronizations():
    job = Job(2)
    job.compile(0, 1)
    beats = []
    for _ in range(4):
        beats.append((job.beat(), len(lines(job))))
        job.meet()
    assert beats == [(False, 0), (False, 0), (True, 1), (False, 1)]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_process_that_is_only_behind_lacks_nothing(slow):
    job = Job(2)
    for number in range(5):
        job.compile(1 - slow, number)
        job.beat(1 - slow)
        job.compile(slow, number)
        job.meet()
        job.meet()
        job.beat(1 - slow)  # the other's heartbeat, with the program and two meetings, comes later
        assert lines(job) == []
        job.beat()
    assert lines(job) == []


def test_a_process_whose_heartbeat_is_late_is_on_neither_side_yet():
    job = Job(3)
    job.beat()
    for process in (1, 2):
        job.compile(process, 1)
    job.meet()
    job.meet()
    assert not job.beat(1, 0)
    assert lines(job) == []
    assert job.beat(2)
    (difference,) = job.sets.differences().shown
    assert (difference.have, difference.lack) == (((1, 2),), ((0, 0),))


def test_where_nothing_moves_every_difference_is_shown():
    job = Job(3)
    job.meet()
    job.compile(0, 1)
    job.beat()
    assert lines(job) == []
    assert [line[: len(ALONE)] for line in lines(job, still=[1])] == [ALONE]
    assert lines(job, still=[0]) == []  # the two others may be about to compile it


def test_a_difference_ends_when_all_have_compiled_it():
    job = Job(2)
    job.compile(0, 1)
    job.meet()
    job.meet()
    assert job.beat()
    job.compile(1, 1)
    job.beat()
    assert lines(job) == []


WORDS = {
    "alone": (
        [(0, 1, "")],
        "process 0 alone has compiled jit(f1) for 4 devices of processes 0-2 at train.py:3; if it "
        "runs it, it may wait for the others",
    ),
    "most": (
        [(0, 1, ""), (2, 1, "")],
        "processes 0, 2 have compiled jit(f1) for 4 devices of processes 0-2 at train.py:3, and "
        "process 1 has not; if they run it, they may wait for the others",
    ),
    "a closure that differs": (
        [(2, 5, "jit(step)"), (0, 4, "jit(step)"), (1, 5, "jit(step)")],
        "processes have compiled different programs jit(step) for 4 devices of processes 0-2, with "
        "arguments f32[8]: process 0 at train.py:3; processes 1-2 at train.py:3. "
        "`shoal.assert_same_program(step, …)` shows the first line that differs",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_the_words(name):
    compiled, message = WORDS[name]
    job = Job(3)
    for process, number, called in compiled:
        job.compile(process, number, name=called)
    job.meet()
    job.meet()
    job.beat()
    assert lines(job) == [message]


def test_sets_of_owners_are_apart():
    job = Job(4)
    job.compile(0, 1, (0, 1))
    job.compile(2, 1, (2, 3))
    job.compile(3, 1, (2, 3))
    for _ in range(2):
        job.meet((0, 1))
    job.beat()
    (line,) = lines(job)
    assert line.startswith(f"{ALONE} jit(f1) for 4 devices of processes 0-1 ")


def test_a_process_that_notes_nothing_lacks_nothing():
    job = Job(2)
    job.notes[1].is_noting = False  # it has no hooks
    job.compile(0, 1)
    for _ in range(3):
        job.meet()
        job.beat()
    assert lines(job, still=[0, 1]) == []


def test_a_heartbeat_is_bounded_and_none_lacks_what_is_not_sent_yet():
    job = Job(2)
    for number in range(3 * MOST_SENT):
        job.compile(0, number)
        job.compile(1, number)
    job.meet()
    job.meet()
    job.beat(0)
    sizes = [sum(len(noted.programs) for noted in job.notes[1].beat()) for _ in range(4)]
    assert sizes == [MOST_SENT] * 3 + [0]
    for _ in range(3):
        job.beat(0)
    assert lines(job) == []  # what the other's lost heartbeats had is unknown


def test_what_exceeds_the_bounds_is_no_difference():
    job = Job(2)
    for number in range(MOST_PROGRAMS + 1):
        job.compile(0, number)
        job.compile(1, MOST_PROGRAMS - number)
    job.meet()
    job.meet()
    for _ in range(2 * MOST_PROGRAMS // MOST_SENT):
        job.beat()
    assert lines(job) == []
    many = Job(2 * MOST_GROUPS)
    for other in range(1, 2 * MOST_GROUPS):
        many.compile(0, 1, (0, other))
    assert len(many.notes[0].beat()) == MOST_GROUPS


def test_a_job_of_threads_has_them_in_its_status():
    job = LocalJob(2)
    for client in job.clients:
        client.programs.is_noting = True
    job.clients[1].programs.note([0, 1], program(1))
    for _ in range(2):
        for client in job.clients:
            client.programs.meet(None)
    known = job.clients[0].job_state(timeout_s=1.0)
    status = JobStatus(tuple(known.members), tuple(program_lines(known.programs)))
    (line,) = status.programs
    assert line.startswith("process 1 alone has compiled jit(f1) ")
    assert str(status).splitlines()[-1] == f"  {line}"


@given(st.data())
def test_equal_programs_are_never_a_difference_and_one_that_is_missing_always_is(data):
    """Each process runs one sequence, its heartbeats at any time; one leaves out one program."""
    num_processes = data.draw(st.integers(2, 4))
    actions = data.draw(st.lists(st.sampled_from(["compile", "meet"]), max_size=12))
    skips = data.draw(st.none() | st.integers(0, actions.count("compile")))
    odd = data.draw(st.integers(0, num_processes - 1))
    job = Job(num_processes)
    numbers = iter(range(len(actions)))
    late = None  # meetings since the program that is left out
    for action in actions:
        number = math.nan if action == "meet" else next(numbers)
        for process in data.draw(st.permutations(range(num_processes))):
            if action == "meet":
                job.notes[process].meet(None)
            elif process != odd or number != skips:
                job.compile(process, int(number))
            if data.draw(st.booleans()):
                job.beat(process)
        if action == "meet" and late is not None:
            late += 1
        elif number == skips:
            late = 0
        shown = job.sets.differences().shown
        assert [difference.program.name for difference in shown] in ([], [f"jit(f{skips})"])
        assert [difference.lack for difference in shown] == [((odd, odd),)] * len(shown)
    job.beat()
    names = [difference.program.name for difference in job.sets.differences().shown]
    assert names == ([f"jit(f{skips})"] if late is not None and late >= 2 else [])


WRONG_DIFFERENCES = {
    "no list": {},
    "no count": [[]],
    "no rows": [7, 0],
    "a row that is too short": [[[ALONE_ROW[0], [0]]], 0],
    "no process": [[[ALONE_ROW[0], [], [[1, 1]], [[0, 1]], None]], 0],
    "a process that is no number": [[[ALONE_ROW[0], [[0, True]], [[1, 1]], [[0, 1]], None]], 0],
    "a program of numbers": [[[[1, 2, 3, 4, 5], [[0, 0]], [[1, 1]], [[0, 1]], None]], 0],
}


@pytest.mark.parametrize("name", WRONG_DIFFERENCES)
def test_malformed_differences_raise_frame_error(name):
    with pytest.raises(FrameError):
        differences_of(WRONG_DIFFERENCES[name])


def test_differences_in_a_large_job_are_small():
    owners = tuple(range(4096))
    sets = ProgramSets(len(owners))
    sets.receive(0, [Noted(None, 0, 40, [(program(n), 0) for n in range(40)])])
    for process in owners:
        sets.receive(process, [Noted(None, 2, 40 if process == 0 else 0, [])])
    differences = sets.differences()
    assert (len(differences.shown), differences.left_out) == (32, 8)
    assert differences.shown[0].lack == ((1, 4095),)
    assert len(json.dumps(differences)) < 8192


def test_differences_are_joined_and_counted():
    ones = [ProgramDifference(program(n), ((0, 0),), ((1, 1),), ((0, 1),), None) for n in range(5)]
    joined = Differences(tuple(ones[:3])).joined(Differences(tuple(ones[2:]), left_out=2))
    assert joined == Differences(tuple(ones), left_out=2)
    assert joined.most(2) == Differences(tuple(ones[:2]), left_out=5)
    assert program_lines(joined.most(1))[1:] == ["and 6 more"]


ROWS = {
    "no list": {},
    "too many": [[None, 0, 0, []]] * (2 * MOST_GROUPS + 1),
    "no row": [7],
    "a count that is true": [[None, True, 0, []]],
    "owners without the sender": [[[1], 0, 0, []]],
    "owners that do not exist": [[[0, 9], 0, 0, []]],
    "a program that is none": [[None, 0, 1, [["d", "f"]]]],
    "a program of numbers": [[None, 0, 1, [[1, 2, 3, 4, 5, 6]]]],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_heartbeat_that_is_wrong_is_refused(name):
    with pytest.raises(FrameError):
        programs_of({"programs": ROWS[name]}, 0, 2)


def test_long_texts_are_cut():
    row = [None, 0, 1, [["d" * 999, "f" * 999, "t" * 999, 1, "s" * 999, 0]]]
    (noted,) = programs_of({"programs": [row]}, 0, 2)
    assert max(map(len, (noted.programs[0][0][i] for i in (0, 1, 2, 4)))) == 200
    assert noted._replace(programs=[]) == Noted(None, 0, 1, [])


def test_a_program_in_words():
    main = b"module @jit_step attributes {} {\n  func.func public @main(%arg0: tensor<8x4xf32> {a}"
    main += b"".join(b", %%arg%d: tensor<i32>" % n for n in range(1, 5)) + b") -> tensor<f32> {}}"
    compiled = program_of(main, [0, 1], "a.py:1")
    assert compiled[1:] == ("jit(step)", "f32[8,4], i32[], i32[] and 2 more", 2, "a.py:1")
    assert program_of(main, [1, 0], "a.py:1").digest != compiled.digest
    assert program_of(b"", [], "").name == "a program"
    complex_one = b"module @pmap {\n func @main(%arg0: tensor<2xcomplex<f32>> {x}) {} }"
    assert program_of(complex_one, [0], "")[1:3] == ("pmap", "c64[2]")


@pytest.mark.parametrize("target", ["CustomSPMDPartitioning", "InspectSharding"])
def test_the_address_of_what_is_called_is_left_out(target):
    text = b'module @jit_f { custom_call @%s(%%arg0) {backend_config = "%s"} }'
    addresses = rb"\10\05\EA\CD4\7F\00\00", b"4712"
    first, second = (program_of(text % (target.encode(), of), [0], "") for of in addresses)
    assert first == second
