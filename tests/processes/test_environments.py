"""Jobs without a launcher, whose processes lack what most have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from quiet_ports import quiet_row
from shoal.runtime.system.service_commands import COORDINATOR

NEEDS_ROOT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="only root may make namespaces, with util-linux's unshare",
)
# What `shoal.initialize` starts first, where no directory can be written.
START = f"""
from shoal.runtime.system.child_process import Spawned
place = Spawned({COORDINATOR!r}, "--processes", "1", "--until-stdin-closes")
line = place.first_line(60)
place.stdin.close()
assert line.startswith(b'{{"address"'), place.last_words()
assert place.wait() == 0
"""
READ_ONLY = """
for directory in /tmp /var/tmp; do
    mount --bind $directory $directory && mount -o remount,bind,ro $directory || exit 5
done
cd /proc && exec "$@"
"""

# A container ends with its first process, and with it what that has started.
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
ENDS_FIRST = """
import os, sys, shoal
shoal.initialize(virtual_devices=1)
shoal.barrier("begun")
if shoal.process_index():
    sys.stdin.readline()
"""


def test_closed_standard_streams_do_not_become_sockets(job):
    """gloo prints to stdout whatever it is; XLA to stderr."""
    script = """
    os.closerange(0, 3)
    try:
        initialize()
    except BaseException as error:  # standard error leads nowhere
        open(f"{__file__}.error", "w").write(str(error))
        raise
    for fd in (1, 2):
        os.write(fd, b"a line of native code")
    barrier("after")
    process.shutdown()
    """
    ended = job.run(2, script)
    errors = [path.read_text() for path in job.folder.glob("*.error")]
    assert [one.code for one in ended] == [0, 0], (ended, errors)


@NEEDS_ROOT
def test_services_start_in_a_read_only_file_system(child_env):
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", sys.executable, "-c", START]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@NEEDS_ROOT
def test_the_first_process_of_a_container_stays_as_long_as_others_need_its_services(
    child_env, tmp_path
):
    (tmp_path / "train.py").write_text(ENDS_FIRST)
    host, port = quiet_row(1)
    env = {**child_env, "SHOAL_COORDINATOR": f"{host}:{port}", "SHOAL_NUM_PROCESSES": "2"}
    env["SHOAL_WARN_AFTER_S"] = "0.1"
    programs = [
        subprocess.Popen(
            [*CONTAINER, sys.executable, "train.py"],
            env={**env, "SHOAL_PROCESS_ID": str(process)},
            cwd=tmp_path, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for process in range(2)
    ]  # fmt: skip
    first, other = programs
    try:
        stays = any("waits for the others" in line for line in first.stderr)
        said = other.communicate("go on\n", timeout=60)[1]
        assert stays, "it has ended, and its services with it"
        assert [program.wait(60) for program in programs] == [0, 0], said
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def test_a_variable_that_does_not_exist_is_named_once_in_a_job(job):
    nearest = "shoal has no variable SHOAL_{}; did you mean 'SHOAL_{}'?\n"
    ended = job.run(2, "initialize()\n", SHOAL_COORDINATOR_ADDRESS="a:1")
    assert [one.code for one in ended] == [0, 0], ended
    named = nearest.format("COORDINATOR_ADDRESS", "COORDINATOR")
    assert [one.err for one in ended] == [named, ""]


def test_a_variable_that_does_not_exist_is_named_where_it_is_why_there_is_no_job(job):
    job.start(0, 2, "process.initialize()\n", SHOAL_PROCESS_ID="1", SHOAL_NPROCS="2")
    (one,) = job.wait()
    assert "(SHOAL_PROCESS_ID=1) without SHOAL_NUM_PROCESSES" in one.err, one
    assert one.err.count("did you mean 'SHOAL_NUM_PROCESSES'?") == 1
