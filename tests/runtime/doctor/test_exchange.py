"""The exchange of reports, with threads as processes."""

from __future__ import annotations

import os
import threading

from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.doctor.examine import exchange
from shoal.runtime.doctor.findings import Report

WAIT_S = 30.0


def exchanged(versions, folders, wait_s=WAIT_S, absent=()):
    """Return the diagnosis of each process."""
    count = len(versions)
    job = LocalJob(count, hosts=[f"h{at}" for at in range(count)])
    answers = [None] * count

    def run(at):
        facts = {"versions": {"jax": versions[at]}}
        report = Report(at, count, f"h{at}", 7, facts, ())
        answers[at] = exchange(job.coordinators[at], report, folders[at], wait_s)

    threads = [threading.Thread(target=run, args=[at]) for at in range(count) if at not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    return answers


def test_process_0_has_all_reports_and_all_the_verdict(tmp_path):
    folder = str(tmp_path)
    first, *others = exchanged(["1"] * 40, [[folder]] * 40)
    assert [report.process for report in first.reports] == [*range(40)]
    assert {str(report.facts["hidden"]) for report in first.reports} == {str({folder: []})}
    assert [(one.is_complete, one.has_problem) for one in (first, *others)] == [(True, False)] * 40
    assert [[report.process for report in one.reports] for one in others] == [
        [at] for at in range(1, 40)
    ]
    assert os.listdir(folder) == []


def test_a_problem_is_one_on_all():
    first, *others = exchanged(["1", "1", "2"], [[]] * 3)
    assert first.differences[0].words == "jax differs: 1 on processes 0-1; 2 on process 2"
    assert [one.has_problem for one in (first, *others)] == [True] * 3


def test_each_has_its_own_report_if_one_does_not_come():
    first, second, third = exchanged(["1"] * 3, [[]] * 3, wait_s=0.2, absent=[2])
    assert third is None
    for at, one in enumerate((first, second)):
        assert (one.is_complete, one.has_problem) == (False, True)
        assert [report.process for report in one.reports] == [at]
        assert "process 2" in one.reports[0].findings[0].words
