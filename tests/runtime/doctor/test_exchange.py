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
    job = LocalJob(count, hosts=[f"h{process}" for process in range(count)])
    answers = [None] * count

    def run(process):
        facts = {"versions": {"jax": versions[process]}}
        report = Report(process, count, f"h{process}", 7, facts, ())
        answers[process] = exchange(job.clients[process], report, folders[process], wait_s)

    threads = [
        threading.Thread(target=run, args=[process])
        for process in range(count)
        if process not in absent
    ]
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
    assert [(answer.is_complete, answer.has_problem) for answer in (first, *others)] == [
        (True, False)
    ] * 40
    assert [[report.process for report in answer.reports] for answer in others] == [
        [process] for process in range(1, 40)
    ]
    assert os.listdir(folder) == []


def test_problem_of_one_process_is_reported_on_all():
    first, *others = exchanged(["1", "1", "2"], [[]] * 3)
    assert first.differences[0].words == "jax differs: 1 on processes 0-1; 2 on process 2"
    assert [answer.has_problem for answer in (first, *others)] == [True] * 3


def test_each_process_has_only_its_own_report_if_one_is_missing():
    first, second, third = exchanged(["1"] * 3, [[]] * 3, wait_s=0.2, absent=[2])
    assert third is None
    for process, answer in enumerate((first, second)):
        assert (answer.is_complete, answer.has_problem) == (False, True)
        assert [report.process for report in answer.reports] == [process]
        assert "process 2" in answer.reports[0].findings[0].words
