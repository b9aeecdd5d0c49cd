"""`shoal run --nnodes 2` on two network namespaces, each with an address of its own."""

from __future__ import annotations

import re
import signal
import textwrap
import time

import pytest

from few import few
from processes.run.launchers import Launchers, codes, said, verdict
from processes.run.test_run_first_to_fail import ENDS, START, WHILE_SAVING
from shoal.testing.network import address_of, why_no_cuts
from shoal.testing.warding import Warden

pytestmark = pytest.mark.skipif(bool(why_no_cuts()), reason=why_no_cuts() or "-")

LOST_AFTER_S = 3.0
JOINED = """
import os, sys
import jax.numpy as jnp, numpy as np
import shoal
shoal.initialize()
mesh = shoal.make_mesh({"data": -1})
x = shoal.put(np.arange(1, 1 + mesh.size, dtype="float32"), shoal.Layout(mesh, "data"))
print("sum", float(jnp.sum(x)), flush=True)
"""
WAITS = """
import shoal
shoal.initialize()
shoal.barrier("begin")
print("waits", flush=True)
if shoal.process_index() == 0:
    import time; time.sleep(600)
shoal.barrier("never")
"""


@pytest.fixture(scope="module")
def warden():
    """Return the warden of two hosts."""
    warden = Warden(2)
    yield warden
    warden.close()


@pytest.fixture
def launchers(tmp_path, child_env, warden):
    """Return launchers, one on each host; nothing of them outlives the test."""
    launchers = Launchers(tmp_path, child_env, warden)
    launchers.env["SHOAL_LOST_AFTER_S"] = str(LOST_AFTER_S)
    yield launchers
    launchers.close()


def test_arrays_are_summed_across_hosts_and_a_failure_is_named_with_its_host(launchers):
    fails = "if shoal.process_index() == 1: raise RuntimeError('no more data')\n"
    script = JOINED + fails + "shoal.barrier('never')\n"
    both = launchers.both("--devices", "2", "--log-dir", "logs", script=script)
    assert codes(both) == [1, 1], said(both)
    assert "p0| sum 10.0\n" in both[0].said
    assert "p1| sum 10.0\n" in both[1].said
    assert verdict(both[0]) == verdict(both[1])
    assert verdict(both[0]).endswith(f": process 1 of 2 ({address_of(1)}) raised RuntimeError")
    assert "  RuntimeError: no more data\n" in both[0].said
    assert f"  Exit code 1. Report: node 0 ({address_of(0)}). Logs" in both[1].said
    assert {path.name for path in (launchers.folder / "logs").glob("p*")} == {
        "p0000.log",
        "p0001.log",
    }
    assert launchers.leaves_nobody()


@pytest.mark.parametrize("other", ["lives", "is off"])
def test_a_cut_cable_is_a_lost_host_on_both_sides(launchers, warden, other):
    both = launchers.both("--devices", "1", script=WAITS)
    for started in both:
        started.until("waits")
    warden.order("cut", 1)
    began_s = time.monotonic()
    if other == "is off":
        launchers.kill(1)  # the other side hears nothing of it
    sides = both if other == "lives" else both[:1]
    assert codes(sides) == [71] * len(sides), said(both)
    assert time.monotonic() - began_s < LOST_AFTER_S + 15
    for node, started in enumerate(sides):
        lost = 1 - node
        assert verdict(started).endswith(
            f": node {lost} ({address_of(lost)}), with process {lost}, was lost"
        ), started.said
        assert "sends no heartbeats: silent for" in started.said
    assert launchers.leaves_nobody()


def test_hosts_that_were_cut_off_meet_again_for_the_next_attempt(launchers, warden):
    script = f"import os\nif os.environ['SHOAL_ATTEMPT'] == '0':{textwrap.indent(WAITS, '    ')}\n"
    both = launchers.both("--devices", "1", "--max-restarts", "1", script=script + JOINED)
    for started in both:
        started.until("waits")
    warden.order("cut", 1)
    for started in both:
        started.until("attempt 1 begins")
    warden.order("mend", 1)
    assert codes(both) == [0, 0], said(both)
    for node, started in enumerate(both):
        assert f"p{node}| sum 3.0\n" in started.said
    assert launchers.leaves_nobody()


def test_a_host_whose_processes_are_all_killed_is_lost_at_once(launchers):
    both = launchers.both("--devices", "1", script=WAITS, SHOAL_LOST_AFTER_S="60")
    for started in both:
        started.until("waits")
    launchers.kill(1)
    assert both[0].code() == 71
    lost = f"node 1 ({address_of(1)}), with process 1, was lost"
    assert verdict(both[0]).endswith(f": {lost}"), both[0].said
    assert launchers.leaves_nobody()


# Ways to end of which another host hears by the network: by a connection of XLA's that breaks, or
# by the other launcher.
ACROSS = (
    "a loop that is shorter, waits in jit", "a difference while one computes",
    "a deadline while one computes", "a kill, and a peer makes an exit of its error", "an exec",
    "an exit that takes longer than the others wait",
    "a reader of feed, while its process computes", "an error, while the others compute",
    "an error in a callback, while its result is saved",
)  # fmt: skip


def where_all_are_one(text):
    """Return a text without the addresses of the hosts."""
    return re.sub(r" \(10\.201\.[\d.]+\)", "", " ".join(text.split()))


@pytest.mark.parametrize("end", few(ACROSS, ACROSS[:1]))
def test_the_process_that_failed_first_is_named_on_both_hosts(launchers, end):
    program, (headline, code, words) = ENDS[end]
    launchers.write(START + program)
    launchers.env["SHOAL_FAILURE_GRACE_S"] = "20"
    both = [launchers.start(0, "-n", "1"), launchers.start(1, "-n", "2")]
    assert codes(both) == [code, code], said(both)
    for started in both:
        assert where_all_are_one(verdict(started)).endswith(f" s: {headline}"), started.said
    assert words in where_all_are_one(both[0].said), both[0].said
    assert launchers.leaves_nobody()


def test_what_fails_after_a_request_to_end_is_reported_on_both_hosts(launchers):
    launchers.write(START + WHILE_SAVING.format(end="raise OSError('no space')"))
    both = [launchers.start(0, "-n", "1"), launchers.start(1, "-n", "2")]
    for started in both:
        started.until("runs")
    both[1].popen.send_signal(signal.SIGTERM)
    assert codes(both) == [1, 1], said(both)
    for started in both:
        assert where_all_are_one(verdict(started)).endswith(" process 1 of 3 raised OSError")
    assert launchers.leaves_nobody()
