"""What the launcher adds to a report in GitHub Actions."""

from __future__ import annotations

import re

import pytest

from shoal.launch.github_actions import ReportFiles, annotated
from shoal.runtime.failures.facts import (
    CallPlace,
    Cause,
    Difference,
    DivergenceSide,
    JobFailure,
    ProcessSet,
    StackFrame,
    Wait,
    Waiting,
)

NO_FILES = ReportFiles({}, "")
REPORT = ["shoal run: failed: x", "  Exit code 1."]


def failure(*causes, headline="process 1 of 2 raised OSError", code=1):
    return JobFailure(kind="exception", headline=headline, exit_code=code, causes=causes)


def raised(process, file="train.py", line=6):
    frame = StackFrame(file=file, line=line, function="f")
    return Cause(processes=ProcessSet([process]), kind="exception", frames=(frame,))


def lines_of(one, files=NO_FILES, workspace=""):
    """Return what is printed, with one word for each text that cannot be known."""
    lines = [*annotated(one, REPORT, files, workspace)]
    tokens = [found[1] for line in lines if (found := re.fullmatch("::stop-commands::(.+)", line))]
    assert len({*tokens}) == len(tokens)
    assert all(len(token) == 32 for token in tokens)
    return [re.sub("|".join(tokens), "RANDOM", line) for line in lines]


def test_an_annotation_the_log_and_the_report(tmp_path):
    log = tmp_path / "p0001.log"
    log.write_bytes(b"".join(b"line %d ::error::x\n" % n for n in range(500)) + b"\xff")
    files = ReportFiles({1: str(log)}, "")
    lines = lines_of(failure(raised(1)), files)
    assert lines[:4] == [
        "::error file=train.py,line=6,title=shoal run::process 1 of 2 raised OSError",
        "::group::log of process 1",
        "::stop-commands::RANDOM",
        "line 301 ::error::x",
    ]
    assert lines[-8:] == [
        "line 499 ::error::x", "\ufffd", "::RANDOM::", "::endgroup::",
        "::stop-commands::RANDOM", *REPORT, "::RANDOM::",
    ]  # fmt: skip
    assert len(lines) == 209


def test_special_characters_of_an_annotation_are_escaped():
    one = failure(raised(0, file="a,b:c%\r.py"), headline="100% of x\n::error::y, z: w")
    assert lines_of(one)[0] == (
        "::error file=a%2Cb%3Ac%25\\r.py,line=6,title=shoal run::100%25 of x\\n::error::y, z: w"
    )


@pytest.mark.parametrize(
    ("cause", "at"),
    [
        (Cause(processes=ProcessSet(), kind="exit"), ""),
        (Cause(processes=ProcessSet([0]), kind="lost", place=CallPlace(file="a.py", line=3)),
         "file=a.py,line=3,"),
        (Cause(processes=ProcessSet([0]), kind="diverged", difference=Difference(
            what="call", sides=(DivergenceSide(processes=ProcessSet([0]), said="x",
                                               place=CallPlace(file="b.py", line=4)),))),
         "file=b.py,line=4,"),
        (Cause(processes=ProcessSet([1]), kind="deadline", wait=Wait(call="barrier", arrived=(
            Waiting(processes=ProcessSet([0]), place=CallPlace(file="c.py", line=5)),))),
         "file=c.py,line=5,"),
    ],
)  # fmt: skip
def test_the_place_is_where_the_evidence_is(cause, at):
    assert lines_of(failure(cause))[0].startswith(f"::error {at}title=shoal run::")


def test_a_file_is_relative_to_the_repository(tmp_path):
    script = tmp_path / "jobs" / "train.py"
    script.parent.mkdir()
    script.touch()
    files = ReportFiles({}, str(script.parent))
    assert "file=jobs/train.py," in lines_of(failure(raised(0)), files, str(tmp_path))[0]
    assert "file=other.py," in lines_of(failure(raised(0, "other.py")), files, str(tmp_path))[0]


def test_a_job_that_was_stopped_is_no_error():
    assert lines_of(failure(code=130)) == ["::stop-commands::RANDOM", *REPORT, "::RANDOM::"]
