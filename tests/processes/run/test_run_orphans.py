"""Nothing outlives a launch: not a grandchild, not a daemon, however the launch ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it needs a subreaper and /proc")

# Each process starts a helper in its group, and a daemon: forked twice, in a session of its own,
# its environment wiped, deaf to SIGTERM.
FAMILY = """
    import os, pathlib, signal, subprocess, sys, time
    me = os.environ["RANK"]
    subprocess.Popen(["sleep", "600"])
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pathlib.Path(f"daemon{me}.new").write_text(str(os.getpid()))
            os.rename(f"daemon{me}.new", f"daemon{me}.pid")
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.waitpid(child, 0)
    while not pathlib.Path(f"daemon{me}.pid").exists():
        time.sleep(0.01)
    print("ready")
    time.sleep(float(sys.argv[1]))
"""
# launcher, supervisor, two services, and two processes with a helper and a daemon each
EVERYBODY = 10
KILLS = {
    "supervisor": signal.SIGKILL,
    "supervisor by number": 40,
}  # Python has no name for the second


@pytest.mark.parametrize("victim", ["launcher", "its group", "supervisor", "supervisor by number"])
def test_sigkill_of_the_launcher_leaves_no_process(launch, victim):
    launch.start("-n", "2", script=FAMILY, arguments=("600",), start_new_session=True)
    launch.await_words("ready", 2)
    assert len(launch.pids()) == EVERYBODY
    if victim == "launcher":
        launch.popen.kill()
    elif victim == "its group":
        os.killpg(launch.popen.pid, signal.SIGKILL)
    else:
        (supervisor,) = launch.pids("shoal-supervise")
        os.kill(supervisor, KILLS[victim])
    assert launch.leaves_nobody()
    code = launch.popen.wait(timeout=60)
    assert code == (128 + KILLS[victim] if victim in KILLS else -signal.SIGKILL)


def test_sigkill_before_the_services_listen_leaves_no_process(launch):
    launch.start("-n", "2", script=FAMILY, arguments=("600",))
    while not launch.pids("shoal.runtime"):
        assert launch.popen.poll() is None
    launch.popen.kill()
    assert launch.leaves_nobody()


def test_what_processes_leave_behind_is_ended_with_the_job(launch):
    finished = launch.run("-n", "2", script=FAMILY, arguments=("0",))
    assert finished.code == 0
    assert launch.pids() == []


def test_older_children_of_the_launching_shell_are_spared(launch, alive):
    """`sh -c 'daemon & exec shoal run …'` makes the daemon the launcher's child."""
    (launch.folder / "script.py").write_text(
        "import time; print('ready', flush=True); time.sleep(600)"
    )
    command = (
        f"sleep 600 & echo $! > old.txt; exec {shlex.quote(sys.executable)} -m shoal run script.py"
    )
    launch.popen = subprocess.Popen(
        ["sh", "-c", command], cwd=launch.folder, env=launch.env, text=True,
        stdin=-3, stdout=-1, stderr=-1,
    )  # fmt: skip
    launch.await_words("ready", 1)
    old = int((launch.folder / "old.txt").read_text())
    (supervisor,) = launch.pids("shoal-supervise")
    os.kill(supervisor, signal.SIGKILL)
    assert launch.popen.wait(timeout=60) == 128 + signal.SIGKILL
    assert alive(old)
    os.kill(old, signal.SIGKILL)
    assert launch.leaves_nobody()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_host_agent_does_not_outlive_the_launcher(launch, number):
    launch.start(
        *("-n", "2"),
        script="""
            import shoal, time
            shoal.initialize(virtual_devices=1)
            print("ready")
            time.sleep(600)
        """,
    )
    launch.await_words("ready", 2)
    assert len(launch.pids("shoal.runtime.jax_service.host_agent")) == 1
    launch.popen.send_signal(number)
    assert launch.leaves_nobody()
    finished = launch.finish()
    if number == signal.SIGTERM:
        assert finished.verdict == "shoal run: interrupted by SIGTERM"
