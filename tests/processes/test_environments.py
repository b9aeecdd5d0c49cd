"""Jobs without a launcher, whose processes lack what most have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from shoal.runtime.system.service_commands import MEETING_PLACE

# What `shoal.initialize` starts first, where no directory can be written.
START = f"""
from shoal.runtime.system.child_process import Spawned
place = Spawned({MEETING_PLACE!r}, "--processes", "1", "--until-stdin-closes")
line = place.first_line(60)
place.stdin.close()
assert line.startswith(b'{{"address"'), place.last_words()
assert place.wait() == 0
"""
READ_ONLY = """
for folder in /tmp /var/tmp; do
    mount --bind $folder $folder && mount -o remount,bind,ro $folder || exit 5
done
cd /proc && exec "$@"
"""


def test_closed_standard_streams_do_not_become_sockets(job):
    """gloo prints to stdout whatever it is; XLA to stderr."""
    script = """
    os.closerange(0, 3)
    initialize()
    for fd in (1, 2):
        os.write(fd, b"a line of native code")
    barrier("after")
    process.shutdown()
    """
    ended = job.run(2, script)
    assert [one.code for one in ended] == [0, 0], ended


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="only root may make a mount namespace, with util-linux's unshare",
)
def test_services_start_in_a_read_only_file_system(child_env):
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", sys.executable, "-c", START]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
