"""The mark by which a child of a member is known: whom it means, and when it means nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.errors import InitializeError
from shoal.runtime.startup.launchers import decide
from shoal.runtime.startup.not_joined import mark_member, refuse_child, unmark_member
from shoal.runtime.startup.options import Arguments

NUMBERS = {"SHOAL_PROCESS_ID": "1", "SHOAL_NUM_PROCESSES": "4"}
PLACE = decide(Arguments(), {**NUMBERS, "SHOAL_COORDINATOR": "h:1"})
OTHER = decide(Arguments(), {**NUMBERS, "SHOAL_COORDINATOR": "h:2"})
ALONE = decide(Arguments(num_processes=1), {**NUMBERS, "SHOAL_COORDINATOR": "h:1"})


@pytest.fixture
def mark(monkeypatch):
    """Return a function that leaves the mark of a process, with fields changed."""
    monkeypatch.setenv("SHOAL_MEMBER", "")

    def leave(**fields):
        mark_member(PLACE)
        fields_of_mark = os.environ["SHOAL_MEMBER"].split(" ")
        names = ("process", "pid", "started_ticks", "namespace")
        fields_of_mark = [
            str(fields.get(name, word)) for name, word in zip(names, fields_of_mark, strict=False)
        ] + fields_of_mark[4:]
        monkeypatch.setenv("SHOAL_MEMBER", " ".join(fields_of_mark))

    return leave


@pytest.fixture
def living():
    """A living process; return what its mark has."""
    process = subprocess.Popen(["sleep", "600"])
    with open(f"/proc/{process.pid}/stat", encoding="ascii") as file:
        started_ticks = file.read().rpartition(")")[2].split()[19]
    yield {"pid": process.pid, "started_ticks": started_ticks}
    process.kill()
    process.wait()


def test_a_child_is_refused_in_the_job_of_its_parent_alone(mark, living):
    mark(**living)
    with pytest.raises(InitializeError, match=rf"child of process 1 \(pid {living['pid']}\)"):
        refuse_child(PLACE)
    refuse_child(OTHER)
    refuse_child(ALONE)


def test_the_member_itself_is_no_child(mark):
    """After an exec, too, which keeps its pid."""
    mark()
    refuse_child(PLACE)


@pytest.mark.parametrize(
    "change",
    [{"started_ticks": 1}, {"namespace": "0" * 16}, {"pid": 2**22 + 1}, {"pid": "x"}],
    ids=["pid used again", "another namespace", "ended", "malformed"],
)
def test_a_mark_that_means_no_living_process_here(mark, living, change):
    mark(**{**living, **change})
    refuse_child(PLACE)


def test_a_process_that_waits_to_be_reaped_has_ended(mark):
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with open(f"/proc/{process.pid}/stat", encoding="ascii") as file:
        started_ticks = file.read().rpartition(")")[2].split()[19]
    mark(pid=process.pid, started_ticks=started_ticks)
    refuse_child(PLACE)
    process.wait()
    process.stdout.close()


def test_process_that_has_left_removes_its_member_mark(mark, living):
    mark(**living)
    unmark_member()
    assert "SHOAL_MEMBER" not in os.environ
    refuse_child(PLACE)
