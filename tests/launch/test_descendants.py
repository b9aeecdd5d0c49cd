"""The end of a process's descendants."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest

from shoal.launch.descendants import descendants, kill_all

# Its main thread ends, while another one sleeps: the kernel shows a zombie that holds a port.
HALF_ENDED = """
import ctypes, os, socket, sys, threading, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
threading.Thread(target=time.sleep, args=(600,)).start()
print("listens", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent links are Linux's")
def test_a_process_of_which_one_thread_lives_is_killed_before_its_port_is_used_again():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    keeper = os.fork()  # what `kill_all` ends must not be another test's
    if keeper == 0:
        os._exit(_end_it(port))
    assert os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]) == 0


def _end_it(port: int) -> int:
    """Return 0 if the port is free once `kill_all` returns."""
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(HALF_ENDED), str(port)]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert popen.stdout is not None
    popen.stdout.readline()
    while _state(popen.pid) != "Z":
        pass
    if [relative.pid for relative in descendants(os.getpid())] != [popen.pid]:
        return 2
    kill_all(within_s=30)
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return 3
    return 0


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
