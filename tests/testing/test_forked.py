"""Processes that are forked from one that imported JAX behave as those that start by themselves."""

from __future__ import annotations

import os
import signal

import pytest

from shoal.errors import PeerFailedError, UsageError
from shoal.runtime.system.process_status import status_of
from testing import functions


@pytest.fixture
def bench(cluster, child_env):
    return cluster(2, devices=2, env=child_env | {"SHOAL_MINE": "x"}, start_method="fork")


def test_forked_processes_share_a_parent_and_have_their_own_state(bench):
    bench.start(functions.what_is_its_own, initialize=False)
    ids = [bench.pid(process) for process in range(2)]
    rows = [ended.value for ended in bench.wait()]
    pids, sessions, parents, processes, mine, drawn = zip(*rows, strict=True)
    assert len({*ids}) == 2
    assert pids == sessions == tuple(ids)
    assert len({*parents}) == 1
    assert (processes, mine) == (("0", "1"), ("x", "x"))
    assert drawn[0] != drawn[1]


def test_each_has_its_own_number_of_devices_though_the_server_has_none(cluster, child_env):
    for devices in (3, 2):
        bench = cluster(2, devices=devices, env=child_env, start_method="fork")
        assert bench.run(functions.global_sum) == [(sum(range(2 * devices)), 2 * devices)] * 2


def test_a_failure_has_its_traceback_and_no_words_of_the_server(bench):
    with pytest.raises(PeerFailedError) as caught:
        bench.run(functions.fail_in, 1)
    assert str(caught.value).startswith("process 1 of 2 failed; so did [0] after it\nTraceback")
    assert "ValueError: no more data" in caught.value.failed[1]
    assert "fork_server" not in caught.value.failed[1]


def test_forked_processes_run_their_exit_handlers(bench):
    bench.start(functions.speak_at_the_end, initialize=False)
    for ended in bench.wait():
        assert (ended.code, ended.out, ended.err) == (0, "atexit\nof the module\n", "")


def test_each_has_streams_of_its_own(cluster, child_env):
    strict = child_env | {"PYTHONIOENCODING": "utf-8:strict"}
    bench = cluster(2, env=strict, start_method="fork")
    for ended in bench.run(functions.change_its_streams, initialize=False):
        assert ended == ("utf-8", False)


def test_killed_forked_process_is_lost_to_its_peer(bench):
    bench.start(functions.meet, *["again"] * 100_000)
    bench.wait_for("after again", 0)
    bench.kill(1)
    survivor, killed = bench.wait()
    assert (survivor.kind, killed.code) == ("ProcessLostError", -signal.SIGKILL)


def test_scripts_start_by_themselves(bench, tmp_path):
    (tmp_path / "script.py").write_text("import sys; print('jax' in sys.modules)")
    assert [ended.out for ended in bench.run(tmp_path / "script.py")] == ["False\n"] * 2


def test_a_server_that_cannot_import_jax_says_so(cluster, child_env, tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('no jax here')")
    env = child_env | {"PYTHONPATH": str(tmp_path)}
    bench = cluster(2, env=env, start_method="fork")
    with pytest.raises(PeerFailedError, match="no jax here"):
        bench.run(functions.meet, "never")


def test_a_server_that_is_killed_takes_its_processes_with_it(bench):
    bench.start(functions.meet, *["again"] * 100_000)
    parent = status_of(bench.pid(0)).parent
    os.kill(parent, signal.SIGKILL)
    assert [ended.code for ended in bench.wait()] == [-signal.SIGKILL] * 2


def test_another_way_to_start_is_refused(cluster):
    with pytest.raises(UsageError, match="start_method='thread' is neither 'spawn' nor 'fork'"):
        cluster(2, start_method="thread")


def test_clusters_of_one_environment_fork_from_one_server_and_others_do_not(cluster, child_env):
    def grandparent(env, devices=1):
        bench = cluster(2, devices=devices, env=env, start_method="fork")
        bench.start(functions.meet, *["again"] * 100_000)
        return status_of(status_of(bench.pid(0)).parent).parent

    first = grandparent(child_env | {"SHOAL_WARN_AFTER_S": "7", "PYTEST_CURRENT_TEST": "one"})
    assert grandparent(child_env | {"SHOAL_WARN_AFTER_S": "8"}) == first
    assert grandparent(child_env, devices=3) == first
    assert grandparent(child_env | {"XLA_FLAGS": "--xla_dump_max_hlo_modules=7"}) != first


def test_a_killed_server_is_replaced(cluster, child_env):
    env = child_env | {"MINE": "of this test"}
    bench = cluster(2, env=env, start_method="fork")
    bench.start(functions.meet, *["again"] * 100_000)
    os.kill(status_of(status_of(bench.pid(0)).parent).parent, signal.SIGKILL)
    assert [ended.code for ended in bench.wait()] == [-signal.SIGKILL] * 2
    again = cluster(2, env=env, start_method="fork")
    assert again.run(functions.meet, "once") == [None, None]


def test_more_files_than_one_message_passes(cluster, child_env):
    many = cluster(130, env=child_env, start_method="fork")
    parents = many.run("os:getppid", initialize=False)
    assert parents == parents[:1] * 130
