"""The status of a process is what the kernel says of it, whatever the process is called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from shoal.runtime.system import stacks
from shoal.runtime.system.child_process import open_memory_file
from shoal.runtime.system.process_status import ProcessStatus, all_statuses, status_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
# A name that looks like the end of the name, and like fields behind it.
NAMED = "open('/proc/self/comm', 'w').write(') Z 1 1 (x'); print(flush=True); input()"


@pytest.fixture
def child():
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", NAMED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with popen:
        popen.stdout.readline()
        yield popen
        popen.kill()


def test_parent_session_and_start(child):
    status = status_of(child.pid)
    assert (status.parent, status.session) == (os.getpid(), child.pid)
    assert status.started_ticks >= status_of(os.getpid()).started_ticks
    assert not status.has_ended
    assert not status.is_stopped
    assert dict(all_statuses())[child.pid]._replace(state="") == status._replace(state="")


def test_stopped_then_ended_then_gone(child):
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert status_of(child.pid).is_stopped
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert status_of(child.pid).has_ended
    child.wait()
    assert status_of(child.pid) is None


@pytest.mark.parametrize("letter", "RSDTtZXI")
def test_every_state_is_living_stopped_or_ended(letter):
    status = ProcessStatus(letter, 1, 1, 1)
    assert (status.has_ended, status.is_stopped) == (letter in "ZX", letter in "Tt")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_zombie_with_a_thread_that_lives_has_not_ended(num_threads):
    assert ProcessStatus("Z", 1, 1, 1, num_threads).has_ended == (num_threads == 1)


def test_a_descriptor_that_is_closed_meanwhile_hides_no_other(monkeypatch):
    listed = os.listdir

    def with_closed(path):
        return ["9999999", *listed(path)]

    assert stacks._dump_path(os.getpid()) is None
    monkeypatch.setattr(os, "listdir", with_closed)
    with open_memory_file(stacks._DUMP_NAME) as file:
        assert stacks._dump_path(os.getpid()) == f"/proc/{os.getpid()}/fd/{file.fileno()}"
