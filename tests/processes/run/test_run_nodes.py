"""`shoal run --nnodes 2`: two launchers on this machine start, end and report one job together."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys

import pytest

from processes.run.conftest import command_line
from processes.run.launchers import Launchers, codes, said, verdict
from shoal.testing.warding import Warden

CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
READY = "import os, sys, time\nprint('ready', flush=True)\n"
SLEEP = READY + "time.sleep(600)\n"
TOGETHER = """
import os
import jax.numpy as jnp, numpy as np
import shoal
shoal.initialize()
mesh = shoal.make_mesh({"data": -1})
x = shoal.put(np.arange(1, 1 + mesh.size, dtype="float32"), shoal.Layout(mesh, "data"))
names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK WORLD_SIZE".split()
ports = [os.environ[name].rpartition(":")[2] for name in
         ("SHOAL_COORDINATOR", "SHOAL_JAX_SERVICE", "MASTER_PORT")]
print("sum", float(jnp.sum(x)), *[os.environ[name] for name in names], *ports, flush=True)
"""


@pytest.fixture
def launchers(tmp_path, child_env):
    """Return launchers of two nodes; nothing of them outlives the test."""
    warden = Warden(0)
    launchers = Launchers(tmp_path, child_env, warden)
    yield launchers
    launchers.close()
    warden.close()


def test_the_processes_of_all_nodes_are_one_job(launchers):
    launchers.write(TOGETHER)
    both = [
        launchers.start(node, "-n", str(count), "--devices", "1", "--log-dir", f"logs{node}")
        for node, count in enumerate((2, 1))
    ]
    assert codes(both) == [0, 0], said(both)
    ports = " ".join(str(launchers.port + offset) for offset in (1, 2, 3))
    first, second = (sorted(started.said.splitlines()) for started in both)
    assert first == [f"p0| sum 6.0 0 0 2 0 3 {ports}", f"p1| sum 6.0 1 1 2 0 3 {ports}"]
    assert second == [f"p2| sum 6.0 2 0 1 1 3 {ports}"]
    logs = [sorted(os.listdir(launchers.folder / f"logs{node}")) for node in range(2)]
    assert logs[1] == ["p0002.log"]
    assert {"p0000.log", "p0001.log"} < set(logs[0])
    assert launchers.leaves_nobody()


def test_a_survivor_on_node_1_that_joined_by_jax_alone_is_not_waited_for(launchers):
    script = """
        import jax, time
        jax.distributed.initialize()
        if jax.process_index() == 0: raise ValueError("no data")
        while True: time.sleep(0.01)
    """
    both = launchers.both("--devices", "1", script=script, SHOAL_GRACE_S="600")
    assert codes(both) == [1, 1], said(both)
    assert "ended by shoal run with SIGKILL: it joined by JAX alone, which" in both[0].said
    assert launchers.leaves_nobody()


def test_a_failure_on_node_1_is_blamed_by_both(launchers):
    script = READY + "if os.environ['RANK'] == '2': sys.exit('out of data')\ntime.sleep(600)\n"
    both = launchers.both("-n", "2", script=script)
    assert codes(both) == [1, 1]
    assert verdict(both[0]) == verdict(both[1])
    assert verdict(both[0]).endswith(": process 2 of 4 ended with exit code 1")
    assert "  SystemExit: out of data\n" in both[0].said
    assert "SystemExit" not in both[1].said, "one report, on node 0"
    last = both[1].said.splitlines()[-1]
    assert re.fullmatch(r"  Exit code 1\. Report: node 0 \(.+\)\. Logs of this host: .+", last)
    assert launchers.leaves_nobody()


@pytest.mark.parametrize("node", [0, 1])
def test_ctrl_c_on_one_node_ends_all(launchers, node):
    both = launchers.both("-n", "2", script=SLEEP)
    for started in both:
        started.until("ready", times=2)
    both[node].popen.send_signal(signal.SIGINT)
    assert codes(both) == [130, 130]
    assert "shoal run: SIGINT: the processes have 5 s to end" in both[node].said
    assert f"shoal run: SIGINT on node {node} (" in both[1 - node].said
    assert {verdict(started) for started in both} == {"shoal run: interrupted by SIGINT"}
    assert launchers.leaves_nobody()


def test_ctrl_c_before_all_have_joined_ends_those_that_have(launchers):
    launchers.write(SLEEP)
    waiting = [launchers.start(0, nodes=3, SHOAL_WARN_AFTER_S="0.2")]
    waiting[0].until("nodes 1, 2 of 3 have not joined")
    waiting.append(launchers.start(1, nodes=3))
    waiting[0].until("has joined; still missing: 2")
    waiting[1].popen.send_signal(signal.SIGINT)
    assert codes(waiting) == [130, 130]
    assert launchers.leaves_nobody()


@pytest.mark.parametrize(
    ("node", "lost"), [(0, "processes 0-1"), (1, "processes 2-3")], ids=["leader", "follower"]
)
def test_a_launcher_that_is_killed_is_named_with_its_processes(launchers, node, lost):
    both = launchers.both("-n", "2", script=SLEEP)
    for started in both:
        started.until("ready", times=2)
    launchers.kill(node)
    assert both[1 - node].code() == 71
    said = verdict(both[1 - node])
    assert f": node {node} (" in said
    assert f"with {lost}, was lost" in said
    assert launchers.leaves_nobody()


def test_a_second_ctrl_c_kills_on_all_nodes(launchers):
    stays = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SLEEP
    both = launchers.both("-n", "2", script=stays, SHOAL_GRACE_S="600")
    for started in both:
        started.until("ready", times=2)
    both[1].popen.send_signal(signal.SIGINT)
    both[0].until("SIGINT on node 1 (")
    both[1].popen.send_signal(signal.SIGINT)
    assert codes(both) == [130, 130]
    assert launchers.leaves_nobody()


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_whose_processes_have_ended_says_that_it_waits(launchers, node):
    waits = "while os.environ['GROUP_RANK'] != '{}' and not os.path.exists('go'): time.sleep(0.01)"
    both = launchers.both(script=READY + waits.format(node), SHOAL_WARN_AFTER_S="0.2")
    both[node].until(f"shoal run: all processes of node {node} (")
    assert ") have ended; those of " in both[node].said
    if node == 1:
        launchers.kill(1)  # it has ended well, and what it had to say has arrived
        both[0].until("has left after its processes had ended")
    (launchers.folder / "go").touch()
    assert both[0].code() == 0, both[0].said
    assert both[1].code() == (0 if node == 0 else -signal.SIGKILL)
    assert launchers.leaves_nobody()


def test_a_notice_on_node_1_is_one_for_all(launchers):
    script = """
    import shoal, time
    shoal.initialize()
    step = 0
    while not shoal.preempted(step):
        shoal.barrier("step")
        if step == 0:
            print("trains", flush=True)
        step += 1
    shoal.preemption.mark_saved(step)
    """
    both = launchers.both("--devices", "1", script=script)
    for started in both:
        started.until("trains")
    both[1].popen.send_signal(signal.SIGTERM)
    assert codes(both) == [75, 75], said(both)
    (preempted,) = {verdict(started) for started in both}
    assert re.fullmatch(r"shoal run: preempted: step \d+ is saved; start it again", preempted)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (["--nnodes", "2"], ["--nnodes", "3"], "was started with --nnodes 3, node 0"),
        (["--devices", "2"], ["--devices", "1"], "was started with --devices 1, node 0"),
        ([], ["other.py"], "runs `other.py script.py`, but node 0"),
    ],
    ids=["nnodes", "devices", "program"],
)
def test_launchers_that_differ_start_nothing(launchers, first, second, words):
    launchers.write(SLEEP)
    launchers.write(SLEEP, "other.py")
    both = [launchers.start(0, *first), launchers.start(1, *second)]
    assert codes(both) == [74, 74]
    for started in both:
        assert words in started.said
        assert "ready" not in started.said
    assert launchers.leaves_nobody()


def test_a_second_launcher_of_node_0_is_refused_and_does_not_end_the_job(launchers):
    launchers.write("print('done')")
    leader = launchers.start(0, SHOAL_WARN_AFTER_S="0.2")
    leader.until("node 1 of 2 has not joined")
    second = launchers.start(0)
    assert second.code() == 74
    assert f"cannot listen at {launchers.address}: Address already in use" in second.said
    assert launchers.start(1).code() == leader.code() == 0


def test_two_launchers_of_one_rank_start_nothing(launchers):
    launchers.write(SLEEP)
    three = [launchers.start(node, nodes=3) for node in (0, 1, 1)]
    assert codes(three) == [74, 74, 74], [started.said for started in three]
    for started in three:
        assert "--node-rank 1 was given on two launchers, on " in started.said
    assert launchers.leaves_nobody()


def test_another_secret_is_refused_and_does_not_end_the_job(launchers):
    launchers.write("print('done')")
    leader = launchers.start(0)
    stranger = launchers.start(1, SHOAL_TOKEN="a guess")
    assert stranger.code() == 74
    words = "has another token than node 0"
    assert words in stranger.said
    leader.until(words)
    assert launchers.start(1).code() == leader.code() == 0


def test_a_node_that_left_before_the_start_may_come_again(launchers):
    launchers.write("print('done')")
    leader = launchers.start(0, nodes=3, SHOAL_WARN_AFTER_S="0.2")
    leader.until("nodes 1, 2 of 3 have not joined")
    launchers.start(1, nodes=3)
    leader.until("has joined; still missing: 2")
    launchers.kill(1)
    leader.until(") has left before the job began: ")
    others = [launchers.start(node, nodes=3) for node in (1, 2)]
    assert codes([leader, *others]) == [0, 0, 0], leader.said
    assert [started.said.count("done") for started in (leader, *others)] == [1, 1, 1]


def test_a_node_that_never_comes_is_named(launchers):
    launchers.write(SLEEP)
    soon = {"SHOAL_WARN_AFTER_S": "0.2", "SHOAL_INITIALIZE_TIMEOUT_S": "1.5"}
    alone = launchers.start(0, **soon)
    assert alone.code() == 74
    missing = ": node 1 of 2 has not joined after {} s: each host must run `shoal run "
    missing += f"--nnodes 2 --node-rank 1 --coordinator {launchers.address} …` with its own rank"
    assert missing.format(0) in alone.said
    assert missing.format(2) in alone.said
    alone = launchers.start(1, **soon)
    assert alone.code() == 74
    where = f"the launcher of node 0 cannot be reached at {launchers.address}"
    assert f"{where} after 2 s: Connection refused" in alone.said


def test_processes_that_cannot_be_started_on_node_1_end_the_job(launchers):
    launchers.write(SLEEP)
    few_files = ("sh", "-c", 'ulimit -n 40; exec "$@"', "sh")
    both = [
        launchers.start(0, "-n", "1"),
        launchers.start(1, "-n", "30", before=few_files),
    ]
    assert codes(both) == [74, 74], said(both)
    for started in both:
        assert re.search(r"process \d+( of 31)? could not be started: ", started.said), started.said
        assert "Too many open files" in started.said
    assert launchers.leaves_nobody()


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="only root may make namespaces, with util-linux's unshare",
)
@pytest.mark.parametrize("is_late", [False, True], ids=["alone", "with its consequence"])
def test_the_launcher_says_where_the_only_process_of_its_host_is_lost(launchers, is_late):
    """Node 1 has a pid namespace of its own, as another host has.

    A late launcher is stopped until process 0 has failed: it reads of the loss and of the failure
    in one turn.
    """
    script = (
        "import ctypes, os, time, shoal\n"
        "shoal.initialize()\n"
        "shoal.barrier('all')\n"
        "if shoal.process_index() == 1:\n"
        "    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # here\n"
        "print('ready', flush=True)\n"
        "shoal.barrier('again')\n"
    )
    launchers.write(script)
    env = {"SHOAL_SILENT_LOST_AFTER_S": "3", "SHOAL_LOST_AFTER_S": "1"}
    if is_late:
        env |= {"SHOAL_LOST_AFTER_S": "30", "SHOAL_WARN_AFTER_S": "1"}
    both = [
        launchers.start(0, "-n", "1", **env),
        launchers.start(1, "-n", "1", before=CONTAINER, **env),
    ]
    if is_late:
        both[0].until("ready")
        (supervisor,) = [pid for pid in launchers.pids(1) if "shoal-supervise" in command_line(pid)]
        os.kill(supervisor, signal.SIGSTOP)
        both[0].until("all processes of node 0 ")  # have ended
        os.kill(supervisor, signal.SIGCONT)
    assert codes(both) == [71, 71], said(both)
    assert "shoal run: process 1 is lost, in native code called at script.py:5 " in both[1].said
    assert launchers.leaves_nobody()
