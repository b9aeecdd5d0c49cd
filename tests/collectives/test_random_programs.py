"""Thousands of programs of collectives in which things go wrong; see `random_programs`.

A finding names its seed, and `play(seed)` runs it again as it ran. `--hypothesis-profile=explore`
plays many more.
"""

import functools
import sys
import types

import pytest
from hypothesis import settings

from collectives import random_programs as programs
from collectives.random_programs import Ended, Gone, program_of, wide_program_of
from collectives.stepped_threads import Hung, Stage
from shoal.collectives import arguments
from shoal.collectives.transport import device_transfer
from shoal.errors import ShoalError
from shoal.runtime import agreement, preemption
from shoal.runtime.client import lanes
from shoal.runtime.rules import call_record, gathering
from shoal.runtime.rules.stopping import ReceivedNotice
from shoal.runtime.system import fault_points

PROFILE = settings.get_current_profile_name()  # see tests/conftest.py
PROGRAMS = {"explore": 20_000, "steady": 2000, "quick": 1000}[PROFILE]
WIDE_PROGRAMS = {"explore": 40_000, "steady": 320, "quick": 160}[PROFILE]
PARTS = 8
# The programs know nothing of the interpreter: the oldest Python plays half of them, others half.
FIRST_PART = int(sys.version_info >= (3, 12))
OWN_PARTS = range(PARTS) if PROFILE == "explore" else range(FIRST_PART, PARTS, 2)


@pytest.fixture
def play(monkeypatch):
    """Return a function that plays the program of a seed, and returns what is wrong."""
    monkeypatch.setenv(fault_points.VARIABLE, "looked at here")
    monkeypatch.setenv("SHOAL_SHARED_MEMORY", "0")

    def play_seed(seed, *, host_memory=False, of=program_of, **options):
        program = of(seed, **options)
        stage = Stage(program.processes, seed)
        time = types.SimpleNamespace(monotonic=stage.clock)
        with monkeypatch.context() as patch:  # else it would keep each program until the end
            patch.setenv("SHOAL_SHARED_MEMORY", "1" if host_memory else "0")
            for module in (arguments, device_transfer, agreement, preemption):
                patch.setattr(module, "time", time)
            return Play(program, stage, patch).findings()

    return play_seed


class Play:
    """One program on a stage."""

    def __init__(self, program, stage, monkeypatch):
        self.program, self.stage = program, stage
        self.raises = {}  # process: [(point, turn, error)]
        self.own = {}
        self.endings = {p: [] for p in range(program.processes)}
        self.lasts = {}  # by process, or by process and lane
        self.answers = {}  # of `preempted`: by step and process
        self.aside = {p: [] for p in range(program.processes)}  # threads: functions that wait
        for client in stage.job.clients:
            client.stop.wait = functools.partial(self.wait_for_stop, client.stop)
        monkeypatch.setattr(fault_points, "reach", self.reach)

    def findings(self):
        for actor, result in enumerate(self.stage.run(self.act)):
            if isinstance(result, Hung):
                return ["all processes wait, and nothing is due"]
            if isinstance(result, BaseException) and not isinstance(result, Gone):
                return [f"process or thread {actor}: {result!r}"]
        problems = programs.findings(self.program, self.endings, self.lasts)
        if self.program.is_wide:
            lasts = {} if self.program.has_deaths else self.lasts
            problems += programs.wide_findings(self.program, self.endings, lasts)
            gone = self.stage.job._meeting.gone
            for at, answers in self.answers.items():
                if len({answer for p, answer in answers.items() if p not in gone}) > 1:
                    problems.append(f"step {at}: {answers}")
        job = self.stage.job
        for client in job.clients:
            client.close()
        return problems + (["a failure is kept for nobody"] if job._meeting._lines else [])

    def act(self, process):
        client = self.stage.job.clients[process]
        has_side = bool(self.program.in_lane("side"))
        if has_side:
            self.aside[process].append(self.stage.start(self.make_calls, client, "side"))
        try:
            self.make_calls(client, "main")
        finally:
            for until_ended in self.aside[process]:
                until_ended()
        lost = [loss.process for loss in client.peer_losses.open()]
        if process in lost:
            return
        if self.program.is_wide and not self.program.has_deaths:
            for lane in ("main", "side")[: 1 + has_side]:
                ends = programs.come_together(client, self.program, lane)
                self.lasts[process, lane] = ends
            return
        try:
            programs.agree_at_last(client, self.program)
        except ShoalError as error:
            self.lasts[process] = error

    def make_calls(self, client, lane):
        for at, operation in self.program.in_lane(lane):
            kinds = {fault.kind for fault in self.program.of(client.process, at)}
            if client.process not in (operation.group or range(self.program.processes)):
                continue
            if "more" in kinds:
                more = operation._replace(kind="barrier", name="one more")
                self.call(client, more, at, is_counted=False)
            if "thread" in kinds:
                start = self.stage.start(self.call, client, operation, at)
                self.aside[client.process].append(start)
            elif "less" not in kinds:
                self.call(client, operation, at)

    def wait_for_stop(self, stop, changes, timeout_s):
        self.stage.wait(lambda: stop.changes != changes, self.stage.clock() + timeout_s)

    def call(self, client, operation, at, *, is_counted=True):
        process, clock = client.process, self.stage.clock
        faults = self.program.of(process, at)
        self.prepare(client, faults)
        timeout_s = programs.timeout_of(operation, faults)
        began, error = clock(), None
        try:
            is_right = programs.perform(client, operation, at, faults)
            if operation.kind == "step":
                self.answers.setdefault(at, {})[process] = client.stop.should_stop(at)
            assert is_right, f"operation {at} returned what belongs to another one"
        except (Gone, Hung, AssertionError):
            raise
        except BaseException as raised:
            if not isinstance(raised, (ShoalError, *programs.OWN_ERRORS)):
                raise
            error = raised
        self.raises.pop(process, None)
        self.stage.interrupts.pop(process, None)
        is_own = error is not None and not isinstance(error, ShoalError)
        if is_counted:
            self.endings[process].append(Ended(at, clock() - began, timeout_s, error, is_own))

    def prepare(self, client, faults):
        process, job = client.process, self.stage.job
        for fault in faults:
            if fault.kind == "late":
                self.stage.pause(fault.value)
            elif fault.kind == "raise":
                self.raises[process] = fault.value
            elif fault.kind == "interrupt":
                self.stage.interrupts[process] = (fault.value, KeyboardInterrupt())
            elif fault.kind == "notice":
                client.give_notice(ReceivedNotice("Terminated", "SIGTERM"))
            elif fault.kind == "frozen":
                job.lose(process, "stopped")
            elif fault.kind == "killed":
                job.lose(process)
                raise Gone
            elif fault.kind == "failed":
                client.report("failed", "Traceback\nValueError: no data")
                raise Gone
            elif fault.kind == "exit":
                client.close()
                raise Gone

    def reach(self, point, process=None):
        if process in self.raises and self.raises[process][0] == point:
            _, turn, error = self.raises[process]
            if turn > 1:
                self.raises[process] = (point, turn - 1, error)
            else:
                del self.raises[process]
                raise error
        if process is not None and self.stage.chance.random() < 0.3:
            self.stage.pause(0.0)


@pytest.mark.parametrize("part", OWN_PARTS)
def test_all_answer_by_the_deadline_all_or_none_and_the_next_point_works(play, part):
    for seed in range(part, PROGRAMS, PARTS):
        problems = play(seed, host_memory=seed % 40 == 0)
        assert not problems, f"seed {seed}: {problems}\n{program_of(seed)}"


@pytest.mark.parametrize("part", OWN_PARTS)
def test_programs_of_lanes_threads_and_notices_leave_all_in_step(play, part):
    for seed in range(part, WIDE_PROGRAMS, PARTS):
        problems = play(seed, of=wide_program_of)
        assert not problems, f"seed {seed}: {problems}\n{wide_program_of(seed)}"


@pytest.mark.parametrize(
    ("owner", "name", "before"),
    [
        (gathering, "_passes", lambda gathering, point, after_loss: point.survivors),
        (gathering.OpenGatherings, "join", lambda self, gatherings, answered: None),
        (lanes.Lanes, "_flush", lambda self, lane: self._counts.pop(lane)),
    ],
    ids=["late to live", "other groups", "interrupts"],
)
def test_the_programs_find_what_was_wrong_before(play, monkeypatch, owner, name, before):
    monkeypatch.setattr(owner, name, before)
    assert any(play(seed, deadly=False) for seed in range(200))


def test_wide_programs_detect_call_records_that_are_not_restarted(play, monkeypatch):
    def goes_on(self, point, base):
        return self._call_records.get(
            (self._group(point.group), point.lane), call_record.CallRecord()
        )

    monkeypatch.setattr(call_record.CallRecords, "start_anew", goes_on)
    # Seeds before these wait in the search for the first difference, for seconds.
    assert any(play(seed, of=wide_program_of, deadly=False) for seed in range(36, 60))
