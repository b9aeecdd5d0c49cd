"""A launch does the same in what it may inherit, and in any pid namespace."""

from __future__ import annotations

import os
import shutil
import sys

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
    assert "failed first" in finished.verdict


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="only root may make a pid namespace, with util-linux's unshare",
)
def test_a_proc_of_another_pid_namespace_is_not_believed(launch):
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
