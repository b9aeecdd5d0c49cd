"""What runs beside the processes: the host agent, its proxy, and JAX's watched service."""

from __future__ import annotations

import os
import signal

import pytest

HOST_AGENT = "shoal.runtime.jax_service.host_agent"
GO = """
signaled, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)  # no handler may take a lock: the wait that it interrupts may hold it
def await_signal(number):
    signal.signal(number, lambda *_: None)
    return lambda: os.read(signaled, 1)
go = await_signal(signal.SIGUSR1)
"""
WAIT = (
    GO
    + """
initialize()
global_sum()
barrier("ready")
say("ready")
"""
)
QUICK = {"SHOAL_LOST_AFTER_S": "2", "SHOAL_HEARTBEAT_S": "0.2"}


def await_words(words, *processes):
    for process in processes:
        for text in process.stdout:
            if text == f"> {words}\n":
                break
        else:
            raise AssertionError(f"it never said {words!r}")


def start(job, count, script, **env):
    processes = [job.start(index, count, WAIT + script, **env) for index in range(count)]
    await_words("ready", *processes)
    return processes


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "its connection closed"), (signal.SIGSTOP, "silent")]
)
def test_the_loss_of_jaxs_service_is_a_python_error_on_all(job, number, words):
    start(job, 2, "while True:\n    barrier('again')\n", **QUICK)
    (service,) = job.descendants(of="shoal.runtime.startup.services")
    os.kill(service, number)
    ended = job.wait()
    os.kill(service, signal.SIGKILL) if number == signal.SIGSTOP else None
    for one in ended:
        assert one.code == 71, one
        assert "JAX's service" in one.err.splitlines()[0], one
        assert words in one.err, one
        assert "Fatal" not in one.err, one
        assert "Check failure" not in one.err, one
    assert job.leaves_no_orphan()


def test_process_that_catches_the_loss_of_jaxs_service_computes_on_and_exits_0(job, said):
    script = """
try:
    while True:
        barrier("again")
except ProcessLostError as error:
    import jax
    say("computes", jax.numpy.ones(3).sum(), jax.process_count())
"""
    start(job, 2, script, **QUICK)
    (service,) = job.descendants(of="shoal.runtime.startup.services")
    os.kill(service, signal.SIGKILL)
    for one in job.wait():
        assert one.code == 0, one
        assert said(one).splitlines()[-1] == "computes 3.0 2", one
        assert "Check failure" not in one.err, one
    assert job.leaves_no_orphan()


def test_a_stopped_process_is_lost_soon_and_learns_it_when_it_wakes(job):
    stopped = start(job, 2, "while True:\n    barrier('again')\n", **QUICK)[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    survivor = job.wait_for(0)
    os.kill(stopped.pid, signal.SIGCONT)
    woken = job.wait_for(1)
    assert survivor.code == 71, survivor
    assert "process 1" in survivor.err
    assert "SIGSTOP" in survivor.err
    assert woken.code == 71, woken
    assert "lost" in woken.err
    assert job.leaves_no_orphan()


def test_a_busy_process_is_as_silent_and_is_not_lost(job, said):
    script = """
if index == 1:
    import ctypes
    ctypes.PyDLL(None).usleep(5_000_000)  # keeps the interpreter's lock
barrier("late")
say("all here")
"""
    start(job, 2, script, **QUICK)
    for one in job.wait():
        assert one.code == 0, one
        assert said(one).splitlines()[-1] == "all here"
    assert job.leaves_no_orphan()


def test_host_agent_and_its_proxy_outlive_the_process_that_started_them(job, said):
    script = """
try:
    while True:
        barrier("again")
except ProcessLostError as error:
    say("lost", *error.lost)
go()
say("still here")
"""
    starter, *others = [job.start(index, 3, WAIT + script) for index in range(3)]
    await_words("ready", starter, *others)
    (host_agent,) = job.descendants(of=HOST_AGENT)
    starter.kill()
    await_words("lost 0", *others)
    assert job.descendants(of=HOST_AGENT) == [host_agent]
    for other in others:
        other.send_signal(signal.SIGUSR1)
    for one in job.wait()[1:]:
        assert (one.code, one.err) == (0, ""), one
        assert said(one).splitlines()[-1] == "still here"
    assert job.leaves_no_orphan()


HOSTS = """
from shoal.runtime.client import over_tcp as coordinator_tcp
this_host = coordinator_tcp.this_host
coordinator_tcp.this_host = lambda: this_host() + str(index // 2)
"""


def test_each_host_has_its_own_host_agent(job):
    script = HOSTS + WAIT + "go()\n"
    processes = [job.start(index, 3, script) for index in range(3)]
    await_words("ready", *processes)
    assert len(job.descendants(of=HOST_AGENT)) == 2
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    assert [one.code for one in job.wait()] == [0, 0, 0]
    assert job.leaves_no_orphan()


def test_host_agent_ends_with_its_job_even_if_the_processes_continue(job):
    script = """
initialize()
barrier("here")
process.shutdown()
say("ready")
go()
"""
    processes = [job.start(index, 2, GO + script) for index in range(2)]
    await_words("ready", *processes)
    assert job.leaves_no_orphan(of="shoal.runtime.")
    for process in processes:
        process.send_signal(signal.SIGUSR1)
    assert [one.code for one in job.wait()] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_of_a_scheduler_to_every_process_ends_no_service(job, number):
    """A program that gets SIGTERM may save its work together, for which all of this is needed."""
    script = """
asked = await_signal(int(sys.argv[4]))
say("listens")
asked()
say(global_sum())
barrier("saved")
"""
    processes = [
        job.start(index, 2, WAIT + script, str(int(number)), **QUICK) for index in range(2)
    ]
    await_words("listens", *processes)
    pids = job.descendants()
    assert (
        len(pids) == 7
    )  # two processes, the parents they were forked by, two services, a host agent
    beside = job.descendants("shoal.runtime.")
    # The program forked last comes last: until it is signaled, the sum has to wait, and none ends.
    for pid in sorted(pids, key=lambda pid: (pid not in beside, pid)):
        os.kill(pid, number)
    for one in job.wait():
        assert (one.code, one.err) == (0, ""), one
    assert job.leaves_no_orphan()


def test_host_agent_that_cannot_reach_jaxs_service_raises_on_all(job):
    script = """
from shoal.runtime.jax_service import host_agent_link
begin = host_agent_link.HostAgent.begin
host_agent_link.HostAgent.begin = lambda self, joined, token, _, limit: begin(
    self, joined, token, "127.0.0.1:1", __import__("time").monotonic() + 1)
initialize()
"""
    for one in job.run(2, script):
        assert one.code == 74, one
        said = " ".join(one.err.split())
        assert "process 0 (" in said
        assert "cannot start the agent of its host" in said, one
        assert "refused" in said
    assert job.leaves_no_orphan()


@pytest.mark.parametrize(
    ("module", "words"),
    [("runtime.startup.services", "JAX's service"), (HOST_AGENT, "it ended, code -9")],
)
def test_killed_service_raises_before_the_devices_are_connected(cluster, child_env, module, words):
    bench = cluster(2, env=child_env, faults="initialize.after_hello@0:pause")
    bench.start("shoal:process_index")
    bench.wait_for_pause("initialize.after_hello", 0)
    (pid,) = bench.pids(module)
    os.kill(pid, signal.SIGKILL)
    bench.release("initialize.after_hello")
    for one in bench.wait():
        assert (one.code, one.kind) == (74, "InitializeError"), one
        assert words in one.error, one
