"""A network that tests can cut: real namespaces, and JAX's collectives across them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.testing import network
from testing import functions

pytestmark = pytest.mark.cuts


def test_a_global_sum_across_hosts(cluster, child_env):
    bench = cluster(2, network=True, env=child_env)
    assert bench.run(functions.global_sum) == [(1.0, 2)] * 2
    assert bench.run(functions.host, initialize=False) == [network.address_of(p) for p in range(2)]


def test_disconnected_process_gets_no_answer_until_reconnected(cluster, child_env):
    bench = cluster(2, network=True, env=child_env, faults="asked#*:pause")
    bench.start(functions.ask_over_network, network.address_of(0), initialize=False)
    bench.wait_for("listens", 0)
    for order, said in ((None, "answer 0"), (bench.cut, "silence 1"), (bench.mend, "answer 2")):
        bench.wait_for_pause("asked", 1)
        if order is not None:
            order(1)
        bench.release("asked", 1)
        bench.wait_for(said, 1)
    assert [ended.code for ended in bench.wait()] == [0, 0]


def test_the_names_stay_inside(cluster, child_env):
    before = Path("/proc/net/dev").read_text().split()
    bench = cluster(2, network=True, env=child_env)
    during = Path("/proc/net/dev").read_text()
    assert "port0" not in during
    assert "hub" not in during
    bench.close()
    assert [word for word in before if word.endswith(":")] == [
        word for word in Path("/proc/net/dev").read_text().split() if word.endswith(":")
    ]


def test_cut_refuses_a_target_without_its_own_network_link(cluster, child_env):
    bench = cluster(2, network=True, env=child_env)
    for who in (2, "the coordinator", "JAX's service"):
        with pytest.raises(UsageError, match="has no network link of its own"):
            bench.cut(who)


def test_each_service_that_stands_alone_has_a_cable(cluster, child_env):
    bench = cluster(2, network=True, services="stand-alone", env=child_env)
    for who in (0, 1, "the coordinator", "JAX's service"):
        bench.cut(who)
        bench.mend(who)
    assert bench.run(functions.global_sum) == [(1.0, 2)] * 2


def test_cuts_without_root_give_the_reason(child_env):
    code = (
        "import os; os.geteuid = lambda: 1000\n"
        "from shoal.testing.network import why_no_cuts; print(why_no_cuts())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "network namespaces need root\n"
