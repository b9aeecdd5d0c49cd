"""200 interrupts at random moments of saves and restores: each is raised, and all stay in step."""

from __future__ import annotations

from processes import interrupting
from shoal.testing.cluster import Cluster

ROUNDS = 200
SEED = 1


def test_no_interrupt_vanishes_and_none_ends_a_process(child_env, tmp_path):
    with Cluster(2, devices=2, env=child_env, start_method="fork") as cluster:
        found = cluster.run(interrupting.in_step, str(tmp_path), ROUNDS, SEED)
    assert sum(one["sent"] for one in found) == ROUNDS
    assert [one["raised"] for one in found] == [one["sent"] for one in found]
    assert [one["late"] for one in found] == [0, 0]
    # Else the interrupts came before or after what they are to interrupt.
    assert all(one["told"] > ROUNDS // 10 for one in found)
