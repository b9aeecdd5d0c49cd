"""Which processes that outlive the others are lost, and what is said of those that are not."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from shoal.launch import processes
from shoal.launch.news import News
from shoal.launch.processes import ChildProcess, Processes, StragglerWatch


@pytest.fixture
def frozen(monkeypatch):
    """Return a set: the pids that a signal has stopped."""
    pids: set[int] = set()
    monkeypatch.setattr(processes, "is_stopped", pids.__contains__)
    return pids


class Watched:
    """Processes with pids from 100 on, all of which have joined."""

    def __init__(self, count):
        self.processes, self.news = Processes(), News(count)
        for index in range(count):
            popen = SimpleNamespace(pid=100 + index)
            self.processes.all.append(ChildProcess(index, popen, None, None))
            self.news.receive({"joined": index})
        self.straggler_watch = StragglerWatch(
            self.processes, self.news, num_processes=count, warn_after_s=10, lost_after_s=5
        )

    def go(self, process, state, at_s, *, is_dismissed=False):
        if is_dismissed:
            self.news.receive({"dismissed": process})
        self.news.receive({"gone": process, "state": state, "words": "silent", "at_s": at_s})

    def end(self, process, at_s):
        self.processes.all[process].code, self.processes.all[process].ended_s = 0, at_s

    def lost(self, now_s):
        return [process.index for process in self.straggler_watch.look(now_s).lost]


def apart(count, *, joined=()):
    """Return processes of which those have joined, and a list: filled once all have devices."""
    watched, devices = Watched(count), []
    watched.news.joined = set(joined)
    watched.straggler_watch = StragglerWatch(
        watched.processes, watched.news, num_processes=count, warn_after_s=10, lost_after_s=5,
        start_s=100.0, have_devices=lambda: bool(devices),
    )  # fmt: skip
    return watched, devices


def test_missing_joins_are_reported_once_when_no_process_can_join_any_more():
    watched, devices = apart(2)
    look = watched.straggler_watch.look(101.0)
    assert (look.lines, look.due_s) == ([], 101.25)
    devices.append("of all")
    assert watched.straggler_watch.look(101.1).lines == []  # looking costs a file of each process
    (line,) = watched.straggler_watch.look(101.25).lines
    assert line.startswith("no process has joined the job, by shoal.initialize() or jax.")
    assert line.endswith(": unless they joined by other means, these are 2 separate programs")
    assert watched.straggler_watch.look(200.0) == ([], [], math.inf)
    assert watched.news.absent_words() == ""  # nor at the end


def test_missing_joins_are_reported_after_a_while_without_devices():
    watched, _ = apart(2)
    look = watched.straggler_watch.look(119.9)
    assert (look.lines, look.due_s) == ([], 120.0)
    (line,) = watched.straggler_watch.look(120.0).lines
    assert line.startswith("no process has joined the job yet, by ")
    assert ": unless they join later, or joined by other means, these are 2 " in line


@pytest.mark.parametrize(("count", "joined"), [(2, [1]), (1, [])])
def test_missing_joins_are_not_reported_if_a_process_joined_or_is_alone(count, joined):
    watched, devices = apart(count, joined=joined)
    devices.append("of all")
    look = watched.straggler_watch.look(130.0)
    assert (list(look.lines), look.due_s) == ([], math.inf)


def test_process_declared_lost_is_lost_at_once_whichever_others_have_exited(frozen):
    watched = Watched(3)
    watched.go(0, "left", 1.0)
    watched.go(1, "lost", 2.0, is_dismissed=True)
    watched.end(0, 1.0)
    assert watched.lost(2.0) == [1]
    watched.processes.all[1].is_lost = True
    assert watched.lost(3.0) == []


def test_a_connection_that_ended_may_be_the_begin_of_a_processs_end(frozen):
    watched = Watched(2)
    watched.go(1, "lost", 2.0)
    assert watched.lost(2.0) == []
    assert watched.straggler_watch.look(2.0).due_s == 7.0
    assert watched.lost(7.0) == [1]
    watched.end(1, 7.5)
    assert watched.lost(8.0) == []


def test_last_process_is_not_lost_unless_it_is_frozen(frozen):
    watched = Watched(2)
    watched.go(0, "left", 1.0)
    watched.end(0, 1.0)
    watched.go(1, "lost", 70.0, is_dismissed=True)
    assert watched.lost(1000.0) == []
    frozen.add(101)
    assert watched.lost(1000.0) == [1]


def test_process_of_a_job_of_one_is_never_lost(frozen):
    watched = Watched(1)
    watched.go(0, "lost", 1.0, is_dismissed=True)
    assert watched.straggler_watch.look(1e9) == ((), (), math.inf)


def test_process_that_runs_longer_than_most_is_reported_once_with_its_state(frozen):
    watched = Watched(8)
    watched.news.joined.remove(4)
    for process, state in ((5, "left"), (6, "failed"), (7, "lost")):
        watched.go(process, state, 3.0)
    frozen.add(107)
    for process in range(3):
        watched.end(process, 5.0)
    assert watched.straggler_watch.look(100.0).lines == []  # most still run
    watched.end(3, 20.0)
    watched.processes.all[7].is_lost = True
    look = watched.straggler_watch.look(20.5)
    assert (look.lines, look.due_s) == ([], 30.0)
    lines = watched.straggler_watch.look(30.0).lines
    head = "process {} (pid {}) still runs, 10 s after the others ended: "
    assert lines == [
        head.format(4, 104) + "it has not joined the job",
        head.format(5, 105) + "it has left the job",
        head.format(6, 106) + "it reported a failure to the others",
        head.format(7, 107) + "it is stopped by a signal; `kill -CONT 107` resumes it",
    ]
    assert watched.straggler_watch.look(99.0).lines == []


def test_process_that_exited_without_joining_is_named_to_the_waiting_ones(frozen):
    watched = Watched(4)
    watched.news.joined -= {2, 3}
    watched.end(3, 1.0)
    look = watched.straggler_watch.look(1.5)  # its HELLO may be on its way
    assert (look.lines, look.due_s) == ([], 2.0)
    assert watched.straggler_watch.look(2.0).lines == [
        "process 3 ended with exit code 0 without joining the job; processes 0-1 wait for it"
    ]
    assert watched.straggler_watch.look(3.0).lines == []
