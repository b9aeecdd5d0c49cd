"""`shoal report`: which files it shows, and what it says of others."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from shoal.cli.main import build
from shoal.cli.report import failure_files, read_failure
from shoal.errors import UsageError
from shoal.launch.log_dir import write_failure
from shoal.runtime.failures.facts import Cause, JobFailure, ProcessSet


def failed(attempt: int = 1) -> JobFailure:
    cause = Cause(processes=ProcessSet([1]), kind="exit", exit_code=3, log="p0001.log")
    return JobFailure(
        kind="exit", headline="process 1 of 2 ended with exit code 3", exit_code=3,
        num_processes=2, causes=(cause,), attempt=attempt, attempts=12, failed_after_s=1.5,
    )  # fmt: skip


def shown(*arguments: str):
    return CliRunner().invoke(build(["report", "watch"]), ["report", *arguments])


def test_each_attempt_is_shown_in_order(tmp_path):
    for number in (0, 1, 2, 10):
        folder = tmp_path / f"attempt{number}"
        folder.mkdir()
        assert write_failure(str(folder), failed(number + 1)) == ""
    attempts = [read_failure(file).attempt for file in failure_files(str(tmp_path))]
    assert attempts == [1, 2, 3, 11]
    result = shown(str(tmp_path))
    assert (result.exit_code, result.output.count("shoal run: failed")) == (0, 4)


def test_a_folder_of_a_job_that_did_not_fail_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (None, str(tmp_path)):
        with pytest.raises(UsageError, match=r"report: there is no failure\.json "):
            failure_files(path)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "1", '{"format": "shoal-failure"}', "{", "\xff", "null", "[" * 9999]
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "failure.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="report: "):
        read_failure(str(path))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory"):
        read_failure(str(tmp_path / "failure.json"))


def test_fields_of_a_later_version_are_ignored(tmp_path):
    write_failure(str(tmp_path), failed())
    path = tmp_path / "failure.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weather": "fine"}))
    assert read_failure(str(path)) == failed()
