"""The bench runs functions and scripts in real processes, and shows what went wrong."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections import UserDict
from pathlib import Path

import pytest

from shoal.errors import DeadlineError, PeerFailedError, UsageError, UsageTypeError
from testing import functions


@pytest.mark.parametrize(
    ("services", "start_method"),
    [("process 0", "spawn"), ("stand-alone", "fork"), ("launcher", "spawn")],
)
def test_a_function_on_all_processes_in_each_way(cluster, child_env, services, start_method):
    bench = cluster(2, devices=2, services=services, env=child_env, start_method=start_method)
    told = bench.run(functions.who_and_sum, 1, (2, {"a": None}), x=b"3")
    who = [(p, 2, (1, (2, {"a": None})), {"x": b"3"}) for p in range(2)]
    assert told == [(one, (6.0, 4)) for one in who]
    with pytest.raises(PeerFailedError) as caught:
        bench.run(functions.fail_in, 1)
    assert str(caught.value).startswith("process 1 of 2 failed; so did [0] after it\nTraceback")
    assert "in fail_in" in caught.value.failed[1]
    assert "ValueError: no more data" in caught.value.failed[1]
    assert "PeerFailedError" in caught.value.failed[0]
    assert "child.py" not in caught.value.failed[1]


def test_without_joining_a_job(cluster, child_env):
    bench = cluster(2, env=child_env | {"MINE": "x"})
    assert bench.run(functions.environment, "MINE", initialize=False) == ["x"] * 2
    assert bench.run("testing.functions:environment", "NO", initialize=False) == [None] * 2


def test_a_script_has_its_arguments_and_its_end(cluster, child_env, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        print(sys.argv[1:], __name__, os.environ["SHOAL_PROCESS_ID"])
        sys.exit("bad" if os.environ["SHOAL_PROCESS_ID"] == "1" else 0)
        """)
    )
    bench = cluster(2, env=child_env)
    bench.start(script, "--lr", 0.1)
    one, two = bench.wait()
    assert (one.code, two.code, two.err) == (0, 1, "bad\n")
    assert [e.out for e in (one, two)] == [f"['--lr', '0.1'] __main__ {p}\n" for p in (0, 1)]
    with pytest.raises(PeerFailedError, match=r"(?s)process 1 of 2 failed.*exit code 1.*\nbad"):
        bench.run(script)


def test_large_output_blocks_no_process(cluster, child_env):
    bench = cluster(2, env=child_env)
    bench.start(functions.print_much, initialize=False)
    assert [(len(e.out), len(e.err)) for e in bench.wait()] == [(2_000_040, 2_000_040)] * 2


def test_a_process_that_was_killed_and_the_error_of_the_others(cluster, child_env):
    faults = "barrier.before_arrive@0#2:pause"
    bench = cluster(3, env=child_env, faults=faults, start_method="fork")
    bench.start(functions.meet, "first", "second")
    bench.wait_for_pause("barrier.before_arrive", 0)
    bench.kill(0)
    killed, *others = bench.wait()
    assert killed.code == -signal.SIGKILL
    assert [(e.code, e.kind) for e in others] == [(71, "ProcessLostError")] * 2
    assert all("process 0" in e.error for e in others)


def test_frozen_process_continues_after_cont(cluster, child_env):
    bench = cluster(2, env=child_env, faults="mine:pause")
    bench.start(functions.reach_twice, initialize=False)
    for process in (0, 1):
        bench.wait_for_pause("mine", process)
    bench.stop(1)
    bench.release("mine")
    assert bench.wait(only=[0])[0].value == [""]
    assert bench.pid(1) in bench.pids()
    bench.cont(1)
    assert bench.wait(only=[1])[0].value == [""]


def test_a_process_that_freezes_itself(cluster, child_env):
    bench = cluster(1, env=child_env, faults="mine:stop; left:raise")
    bench.start(functions.reach_twice, initialize=False)
    os.waitid(os.P_PID, bench.pid(0), os.WSTOPPED)
    bench.cont(0)
    assert bench.wait()[0].value == ["left:raise"]


@pytest.mark.parametrize("number", ["terminate", "interrupt"])
def test_signals_that_programs_handle(cluster, child_env, number):
    bench = cluster(1, env=child_env)
    bench.start(functions.sleep, initialize=False)
    bench.wait_for("asleep", 0)
    getattr(bench, number)(0)
    (ended,) = bench.wait()
    assert (ended.code, ended.kind) == {
        "terminate": (-signal.SIGTERM, ""),
        "interrupt": (-signal.SIGINT, "KeyboardInterrupt"),
    }[number]


def test_a_pause_holds_one_process_and_the_others_wait(cluster, child_env):
    faults = "barrier.before_arrive@1:pause"
    bench = cluster(2, env=child_env, faults=faults, start_method="fork")
    bench.start(functions.meet, "here")
    assert bench.wait_for_pause("barrier.before_arrive") == 1
    bench.wait_for("before here", 0)
    assert not any("after here" in out for out in bench.lines_of(0))
    bench.release("barrier.before_arrive", 1)
    assert [e.code for e in bench.wait()] == [0, 0]


@pytest.mark.parametrize("services", ["process 0", "stand-alone", "launcher"])
def test_the_services_are_found_by_name(cluster, child_env, services):
    faults = "barrier.before_arrive:pause"
    bench = cluster(2, services=services, env=child_env, faults=faults, start_method="fork")
    bench.start(functions.meet, "here")
    for process in (0, 1):
        bench.wait_for_pause("barrier.before_arrive", process)
    names = [0, 1, "the coordinator", "JAX's service"]
    pids = [bench.pid(who) for who in names]
    assert len(set(pids)) == 4
    assert set(pids) <= set(bench.pids())
    assert "server.coordinator" in Path(f"/proc/{pids[2]}/cmdline").read_text()
    bench.release("barrier.before_arrive")
    bench.wait()


def test_the_deadline_shows_what_each_said_last(cluster, child_env):
    bench = cluster(2, env=child_env, deadline_s=3)
    bench.start(functions.sleep, initialize=False)
    with pytest.raises(DeadlineError) as caught:
        bench.wait()
    assert str(caught.value).startswith("the test bench waited 3 s until processes [0, 1] end\n")
    assert str(caught.value).count("  | asleep") == 2
    assert caught.value.missing == (0, 1)
    with pytest.raises(DeadlineError, match="process 0 says 'never'"):
        bench.wait_for("never", 0)


def test_wait_for_raises_if_the_process_ends_first(cluster, child_env):
    bench = cluster(1, env=child_env)
    bench.start(functions.exit_with, 3, initialize=False)
    with pytest.raises(PeerFailedError, match=r"never printed 'ready'.*\(pid .*ended with code 3"):
        bench.wait_for("ready", 0)


def test_what_cannot_travel_is_the_process_s_own_error(cluster, child_env):
    with pytest.raises(
        PeerFailedError, match="what unfit returned is an object, which cannot be sent"
    ):
        cluster(1, env=child_env).run(functions.unfit, initialize=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"processes": 0}, "processes=0"),
        ({"processes": True}, "processes=True"),
        ({"processes": 2, "devices": 0}, "devices=0"),
        ({"processes": 2, "services": "none"}, "'none' is not one of 'process 0', 'stand-alone'"),
        ({"processes": 2, "services": "launcher", "network": True}, "no network to cut"),
        ({"processes": 2, "deadline_s": 0}, "deadline_s=0"),
        ({"processes": 2, "deadline_s": None}, "deadline_s=None"),
        ({"processes": 2, "faults": "x:kil"}, "did you mean 'kill'"),
        ({"processes": 0, "devices": 0, "deadline_s": -1}, "3 problems"),
    ],
)
def test_a_wrong_cluster_is_refused(cluster, arguments, told):
    with pytest.raises(UsageError) as caught:
        cluster(**arguments)
    assert told in str(caught.value)


def test_a_wrong_program_is_refused(cluster, child_env):
    bench = cluster(2, env=child_env)

    def inner():
        pass

    for program, kind, told in (
        (inner, UsageError, "not at the top of its module"),
        (lambda: 1, UsageError, "not at the top"),
        (len, UsageTypeError, "is not a function"),
        ("no.such:thing", UsageError, "there is no module 'no.such'"),
        ("no_such.py", UsageError, "there is no script 'no_such.py'"),
    ):
        with pytest.raises(kind, match=told):
            bench.start(program)
    with pytest.raises(UsageTypeError, match=r"arguments\[0\] is an object"):
        bench.start(functions.who, object())
    with pytest.raises(UsageError, match=r"processes 0\.\.1, not \[2\]"):
        bench.start(functions.who, only=[2])
    with pytest.raises(UsageError, match="process 1 was not started"):
        bench.kill(1)
    with pytest.raises(UsageError, match="the coordinator does not run"):
        bench.kill("the coordinator")
    with pytest.raises(UsageError, match="did you mean 'the coordinator'"):
        bench.kill("coordinator")
    with pytest.raises(UsageError, match="has no network"):
        bench.cut(0)


def test_closed_cluster_leaves_no_process_and_no_folder(cluster, child_env):
    with cluster(2, env=child_env) as bench:
        orphans = bench.run(functions.leave_somebody_behind, initialize=False)
        assert set(orphans) <= set(bench.pids())
        folder = bench.folder
    assert bench.pids() == []
    assert not os.path.exists(folder)
    with pytest.raises(UsageError, match="this cluster is closed"):
        bench.start(functions.who)


def test_nothing_is_left_when_the_test_is_killed(child_env, tmp_path):
    script = tmp_path / "test.py"
    script.write_text(
        textwrap.dedent("""
        from shoal.testing.cluster import Cluster
        from testing import functions
        bench = Cluster(2)
        bench.start(functions.sleep, initialize=False)
        for process in (0, 1):
            bench.wait_for("asleep", process)
        print(*(bench.pid(p) for p in (0, 1)), flush=True)
        bench.wait()
        """)
    )
    tests = str(Path(functions.__file__).parents[1])
    path = os.pathsep.join([tests, child_env["PYTHONPATH"]])
    env = child_env | {"PYTHONPATH": path}
    with subprocess.Popen([sys.executable, script], env=env, stdout=subprocess.PIPE) as test:
        handles = [os.pidfd_open(int(pid)) for pid in test.stdout.readline().split()]
        test.kill()
    assert len(handles) == 2
    for handle in handles:
        ready, _, _ = select.select([handle], [], [], 30)
        assert ready, "it outlived the test"
        os.close(handle)


def test_cluster_starts_while_another_thread_changes_the_environment(cluster, child_env):
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            os.environ["SHOAL_TEST_CHANGES"] = "x"
            del os.environ["SHOAL_TEST_CHANGES"]

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(30):  # one in three failed with "Bad address"
            cluster(1, env=child_env)
    finally:
        done.set()
        changing.join()


def test_cluster_starts_if_a_variable_disappears_while_it_is_read(cluster, monkeypatch):
    class Changing(UserDict[str, str]):
        def __iter__(self):
            yield from ["SHOAL_TEST_GONE", *self.data]  # another thread deletes it now

    monkeypatch.setattr(os, "environ", Changing(os.environ))
    assert cluster(2).run("operator:add", 1, 2, initialize=False) == [3, 3]
