"""What differs between the reports of processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.runtime.doctor.findings import (
    NOTE,
    PROBLEM,
    CheckResult,
    Report,
    compare,
    groups,
    packed,
    unpacked,
)

NOW = 1_800_000_000.0


def job(*facts, hosts="ab"):
    """Return one report for each mapping of facts; the hosts take turns."""
    count = len(facts)
    return [
        Report(process, count, hosts[process % len(hosts)], 7, own, ())
        for process, own in enumerate(facts)
    ]


def said(*facts, **more):
    return [finding.words for finding in compare(job(*facts, **more))]


def test_equal_processes_differ_in_nothing():
    facts = {
        "versions": {"jax": "0.10.2"},
        "clock": {"time_s": NOW},
        "devices": {"platform": "cpu", "count": 2},
        "folders": {"/shared": {}},
        "hidden": {"/shared": []},
        "address": {"address": "a:1", "resolves_to": ["10.0.0.1"]},
    }
    assert said(facts, facts, facts) == []


def test_versions_and_whether_they_must_be_equal():
    one, two = ({"versions": {"jax": j, "numpy": n}} for j, n in (("1", "2.0"), ("2", "2.1")))
    findings = compare(job(one, two, one))
    assert [(finding.level, finding.words) for finding in findings] == [
        (PROBLEM, "jax differs: 1 on processes 0, 2; 2 on process 1"),
        (NOTE, "numpy differs: 2.0 on processes 0, 2; 2.1 on process 1"),
    ]


def test_a_package_that_one_lacks():
    one, two = {"versions": {"libtpu": "1"}}, {"versions": {}}
    assert said(one, two) == ["libtpu differs: 1 on process 0; not set on process 1"]


@given(st.lists(st.floats(-3600, 3600), min_size=2, max_size=6))
def test_clocks_are_compared_with_the_middle_one(offsets):
    findings = compare(job(*({"clock": {"time_s": NOW + offset}} for offset in offsets)))
    middle = sorted(offsets)[(len(offsets) - 1) // 2]
    off = [
        process
        for process, offset in enumerate(offsets)
        if abs((NOW + offset) - (NOW + middle)) > 10.0
    ]
    assert bool(findings) == bool(off)
    for process in off[:5]:
        assert f"that of process {process} (" in findings[0].words


def test_clock_difference_is_shown_with_its_process():
    rows = [{"clock": {"time_s": NOW + offset}} for offset in (0.0, 0.2, -300.0)]
    assert said(*rows) == [
        "clocks differ: that of process 2 (a) is 5.0 min behind, compared with process 0 (a)"
    ]


def test_platforms_and_counts_of_devices():
    gpu, cpu = ({"devices": {"platform": p, "count": c}} for p, c in (("gpu", 8), ("cpu", 1)))
    assert said(gpu, gpu, cpu) == [
        "the platform of the devices differs: gpu on processes 0-1; cpu on process 2"
    ]
    assert said(gpu, {"devices": {"platform": "gpu", "count": 7}}, {"devices": {}}) == [
        "the number of devices differs: 8 on process 0; 7 on process 1"
    ]


def test_a_folder_that_is_not_shared():
    rows = [{"folders": {"/s": {}}, "hidden": {"/s": hidden}} for hidden in ([1], [0, 2], [1])]
    assert said(*rows) == [
        "/s is not shared: process 0 (a) does not see the files of process 1; process 1 (b) does "
        "not see the files of processes 0, 2; process 2 (a) does not see the files of process 1"
    ]


def test_a_folder_that_one_cannot_write_is_not_called_unshared_too():
    rows = [{"folders": {"/s": {}}, "hidden": {"/s": [1]}}, {"hidden": {"/s": [0, 1]}}]
    assert said(*rows) == []


def test_the_loopback_is_no_address_for_several_hosts():
    facts = {"address": {"address": "node:1", "resolves_to": ["127.0.1.1"]}}
    assert said(facts, facts) == [
        "node:1 is the loopback of each host, and the processes are on 2 hosts"
    ]
    assert said(facts, facts, hosts="a") == []


def test_many_versions_are_not_all_listed():
    problem = said(*({"versions": {"jax": str(process)}} for process in range(9)))[0]
    assert problem.endswith("4 on process 4; and 4 more")


def test_a_report_without_facts_is_a_side_of_its_own():
    assert groups(job({"versions": {"jax": "1"}}, {}), "versions", "jax") == {"1": [0], None: [1]}


def test_reports_travel():
    report = job({"clock": {"time_s": NOW}})[0].with_check("host", CheckResult({"cores": 2}))
    assert unpacked(packed(report)) == report
