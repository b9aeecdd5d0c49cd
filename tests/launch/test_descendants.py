"""The end of a process's descendants."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

# Its main thread ends, while another one sleeps: the kernel shows a zombie that holds a port.
HALF_ENDED = """
import ctypes, socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=time.sleep, args=(600,)).start()
print(server.getsockname()[1], flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
PARENT = """
import os, socket, subprocess, sys
from shoal.runtime.system.process_status import descendants, kill_all
from shoal.runtime.system.process_status import status_of
command = [sys.executable, "-I", "-S", "-c", sys.argv[1]]
popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
port = int(popen.stdout.readline())
while status_of(popen.pid).state != "Z":
    pass
assert [relative.pid for relative in descendants(os.getpid())] == [popen.pid]
kill_all(within_s=30)
socket.create_server(("127.0.0.1", port)).close()
"""


# As in many containers, the session's leader is outside: its number reads as 0 (pid_namespaces(7)).
CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc"]


@pytest.mark.skipif(sys.platform != "linux", reason="parent links and states are read in /proc")
@pytest.mark.parametrize("where", [[], CONTAINER], ids=["host", "container"])
def test_a_process_of_which_one_thread_lives_is_killed_and_its_port_is_free(child_env, where):
    if where and (os.geteuid() != 0 or not shutil.which(where[0])):
        pytest.skip("only root may make a pid namespace, with util-linux's unshare")
    command = [*where, sys.executable, "-c", PARENT, HALF_ENDED]
    done = subprocess.run(command, env=child_env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
