"""`shoal doctor`: its usage, and what it prints on a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from shoal.cli.doctor import grouped, json_of, print_diagnosis, render
from shoal.draw.media.terminal import plain
from shoal.runtime.doctor.findings import NOTE, Diagnosis, Finding, Report, of_processes

LATE = Finding("devices", "the driver hangs", "look at it")
NAME = Finding("host", "its name is unknown", level=NOTE)
JOB = of_processes(
    tuple(
        Report(at, 3, f"n{at}", 7, {"versions": {"jax": jax}, "clock": {"time_s": 1e9}}, found)
        for at, (jax, found) in enumerate([("1", (NAME,)), ("1", (NAME, LATE)), ("2", (LATE,))])
    )
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "0"], "-n 0 must be a whole number, at least 1"),
        (["--devices", "2"], "--devices 2 is for the processes of -n N"),
        (["-n", "2", "--alone"], "--alone is for one of several processes: leave out -n"),
        (["--timeout", "0"], "--timeout 0 must be a positive number of seconds"),
    ],
)
def test_wrong_usage(options, words, child_env):
    command = [sys.executable, "-m", "shoal", "doctor", *options]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"shoal: doctor: {words}\n"


def test_findings_are_listed_once_with_problems_first():
    (differs, _), *rest = grouped(JOB).items()
    assert differs.words == "jax differs: 1 on processes 0-1; 2 on process 2"
    assert rest == [(LATE, [1, 2]), (NAME, [0, 1])]


@pytest.mark.parametrize(
    ("ahead_s", "words"),
    [(-0.3, "its clock agrees with that of this host"),
     (0.4, "its clock agrees with that of this host"),
     (-2.0, "its clock is -2 s from that of this host")],
)  # fmt: skip
def test_a_clock_is_off_by_whole_seconds(ahead_s, words):
    bucket = {"rights": ["list"], "credentials": "none", "lifecycle": "x", "clock_ahead_s": ahead_s}
    host = {"name": "a", "addresses": [], "cores": 1}
    facts = {"buckets": {"s3://b": bucket}, "host": host}
    shown = plain(render(of_processes((Report(0, 1, "a", 7, facts, ()),))), 100)
    assert f"{words}\n" in shown
    assert "a (no address), 1 core\n" in shown


def test_doctor_is_rendered_as_text():
    assert plain(render(JOB), 100).splitlines() == [
        "shoal doctor: 3 processes on 3 hosts",
        "launcher  no rule holds",
        "versions  processes 0-1: jax 1",
        "          process 2: jax 2",
        "clock     2001-09-09T01:46:40Z, 0 us apart",
        "2 problems",
        "  problem versions: jax differs: 1 on processes 0-1; 2 on process 2",
        "          -> install the same everywhere",
        "  problem devices: processes 1-2: the driver hangs",
        "          -> look at it",
        "  note    host: processes 0-1: its name is unknown",
    ]


def test_untrusted_words_do_not_reach_the_terminal():
    report = Report(0, 1, "a\x1b[2J", 7, {"program": {"path": "\x1b[31m"}}, ())
    assert "\x1b" not in plain(render(Diagnosis((report,), (), 0, True, False)), 100)


def test_the_same_as_json():
    said = json.loads(json.dumps(json_of(JOB)))
    assert [one["level"] for one in said["findings"]] == ["problem", "problem", "note"]
    assert [one["processes"] for one in said["findings"]] == [[], [1, 2], [0, 1]]
    assert said["processes"][2]["facts"]["versions"] == {"jax": "2"}


def test_colours_only_on_a_terminal(capfd, monkeypatch):
    print_diagnosis(JOB, as_json=False)
    assert "\x1b" not in capfd.readouterr().out
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    with os.fdopen(follower, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        print_diagnosis(JOB, as_json=False)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "\x1b[1;31m  problem" in shown
    assert all(len(line) < 100 for line in shown.splitlines())


def test_a_job_of_which_no_process_reported():
    assert "no process reported" in plain(render(Diagnosis((), (LATE,), None, False, True)), 100)
