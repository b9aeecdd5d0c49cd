"""A launch does the same in what it may inherit, and in any pid namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

# Starts the rest of its command line with SIGCHLD ignored, or blocked.
AMISS = {
    "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])",
}
# Its pipes are closed before it ends, so only SIGCHLD can say that it has.
ENDS = "import os, sys, time; os.close(1); os.close(2); time.sleep(0.2); os._exit(3)"


@pytest.mark.parametrize("amiss", AMISS)
def test_exit_codes_are_seen_if_sigchld_was_ignored_or_blocked(launch, amiss):
    start = f"import os, signal, sys; {AMISS[amiss]}; os.execv(sys.argv[1], sys.argv[1:])"
    finished = launch.run("-n", "1", script=ENDS, before=[sys.executable, "-c", start])
    assert finished.code == 3, finished
    assert finished.verdict.endswith(": process 0 ended with exit code 3")


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="only root may make a pid namespace, with util-linux's unshare",
)
def test_proc_of_another_pid_namespace_is_not_used(launch):
    """Under the pids of this job it shows other processes, or none."""
    launch.start(
        *("-n", "2"),
        script="""
            import os, shoal
            shoal.initialize(virtual_devices=1)
            helper = os.fork() or os.execvp("sleep", ["sleep", "600"])
            shoal.step(0)
            print("together:", *shoal.allgather(shoal.process_index()))
        """,
        before=["unshare", "--pid", "--fork"],
    )
    finished = launch.finish()
    assert finished.lines == ["p0| together: 0 1", "p1| together: 0 1"], finished
    assert finished.code == 0
    assert launch.leaves_nobody()


UNKNOWN = "shoal has no variable SHOAL_NPROCS; did you mean 'SHOAL_NUM_PROCESSES'?"


def test_a_variable_that_does_not_exist_is_named_once_in_a_job(launch):
    """By the launcher, for programs that do not use shoal; what the script sets, by process 0."""
    launch.env["SHOAL_NPROCS"] = "2"
    finished = launch.run(
        *("-n", "2"),
        script="""
            import os, shoal
            os.environ["SHOAL_TIMEOUTS"] = "5"
            shoal.initialize(virtual_devices=1)
        """,
    )
    assert finished.code == 0, finished
    lines = finished.err.splitlines()
    assert [line for line in lines if "SHOAL_NPROCS" in line] == [f"shoal run: {UNKNOWN}"]
    own = "p0| shoal has no variable SHOAL_TIMEOUTS; did you mean 'SHOAL_TIMEOUT_S'?"
    assert [line for line in lines if "SHOAL_TIMEOUTS" in line] == [own]


@pytest.mark.parametrize("code", [0, 3])
def test_python_that_inspects_and_warnings_that_are_errors_change_no_end(launch, code):
    """With PYTHONINSPECT, sys.exit is shown as an error, and the exit code is 1."""
    launch.env |= {"PYTHONINSPECT": "1", "PYTHONWARNINGS": "error"}
    finished = launch.run("-n", "2", script=f"import sys; sys.exit({code})")
    assert finished.code == code, finished
    for unwanted in ("Traceback", "Warning"):
        assert unwanted not in finished.err, finished.err


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="only root may make a network namespace, with util-linux's unshare",
)
def test_a_loopback_that_is_down_is_named_at_once(launch):
    """In a new network namespace it is, and all the words were that nothing listens."""
    down = "the loopback interface of this host (lo) is down"
    finished = launch.run("-n", "2", script="print('ran')", before=["unshare", "--net"])
    assert finished.code == 74, finished
    assert finished.err.startswith(f"shoal: run: {down}\n")
    assert "`ip link set lo up`" in finished.verdict
    script = """
        import shoal
        from shoal.runtime.doctor.host_state import check_host
        print(check_host().findings[0].words)
        shoal.initialize(coordinator_address="127.0.0.1:1", num_processes=2, process_id=1)
    """
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", textwrap.dedent(script)],
        env=launch.env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == f"{down}\n", done
    assert f"process 1 of 2 cannot join the job at 127.0.0.1:1: {down}\n" in done.stderr
