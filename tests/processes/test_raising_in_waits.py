"""What a signal handler raises in a wait leaves the call; for the others it counts as Ctrl-C does.

12 classes of exceptions x all public calls that wait x before and after the wait was logged, by
`make test-faults`; a slice of it runs with the suite.
"""

from __future__ import annotations

import itertools

import pytest

from processes.raising_in_waits import CALLS, RAISED, Came, Case, play
from shoal.testing.cluster import Cluster

# How Ctrl-C ends the call for the process that comes later; the others return.
FAILED = dict.fromkeys(
    ["sync_devices", "restore", "Checkpoints.restore", "Checkpoints.resume"], "PeerFailedError"
) | dict.fromkeys(["save", "Checkpoints.save"], "SaveAbortedError")
SLICE = [
    Case(call, raised, is_late)
    for call, raised, is_late in itertools.product(
        ["barrier", "broadcast", "save", "live_processes", "Checkpoints.wait", "preempted"],
        ["TimeoutError", "JSONDecodeError"],
        [False, True],
    )
]
MATRIX = [Case(*case) for case in itertools.product(CALLS, RAISED, [False, True])]


def check(cases, child_env, folder, deadline_s):
    env = {**child_env, "SHOAL_WARN_AFTER_S": "0.3"}
    with Cluster(2, devices=2, env=env, start_method="fork", deadline_s=deadline_s) as cluster:
        later, left = cluster.run(play, str(folder), [(*case,) for case in cases])
    assert [(case, Came(*came)) for case, came in zip(cases, left, strict=True)] == [
        (case, Came(case.raised, is_own=True, is_in_step=True)) for case in cases
    ]
    assert [(case, Came(*came)) for case, came in zip(cases, later, strict=True)] == [
        (case, Came(FAILED.get(case.call, ""), is_own=False, is_in_step=True)) for case in cases
    ]


def test_what_a_handler_raises_in_a_wait_leaves_the_call(child_env, tmp_path):
    check(SLICE, child_env, tmp_path, 60.0)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_exception_of_a_handler_leaves_every_call(child_env, tmp_path):
    check(MATRIX, child_env, tmp_path, 550.0)
