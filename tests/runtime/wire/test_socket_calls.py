"""What a signal handler raises inside of a call of a socket, and what the socket itself raises."""

import contextlib
import ctypes
import gc
import json
import select
import signal
import socket
import sys
import threading
import time

import pytest

from quiet_ports import quiet_row
from shoal.runtime.client.over_tcp import join
from shoal.runtime.jax_service.host_agent_link import HostAgent, find_host_agent
from shoal.runtime.system.child_process import Spawned
from shoal.runtime.wire.connection import Channel, UnknownNameError, open_socket
from shoal.runtime.wire.frames import address_text
from shoal.runtime.wire.socket_calls import LinkError, LinkTimeoutError, socket_call

RAISED = [
    TimeoutError("the step took too long"),
    OSError(5, "Input/output error"),
    BlockingIOError(11, "try again"),
    ConnectionResetError(104, "Connection reset by peer"),
    ValueError("the step took too long"),
    json.JSONDecodeError("Expecting value", "", 0),
    KeyError("x"),
]
SOON_S = 0.1


@contextlib.contextmanager
def leaving(error):
    """A block that the exception of a signal handler leaves, as it is.

    Without garbage collection: an exception within one of its callbacks, of which Hypothesis has
    one, is printed and ignored.
    """

    def handler(*_):
        raise error

    gc.disable()
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, SOON_S)
    try:
        with pytest.raises(type(error)) as raised:
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert raised.value is error


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


every_class = pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)


@every_class
def test_what_a_handler_raises_in_a_call_leaves_it(pair, error):
    with leaving(error):
        socket_call(pair[0].recv, 1)


@every_class
def test_what_a_handler_raises_leaves_a_channel(pair, error):
    here = Channel(pair[0], max_body_bytes=1 << 24)
    with leaving(error):
        here.receive(time.monotonic() + 60)
    with leaving(error):
        here.send(bytes(1 << 24), time.monotonic() + 60)


def test_what_another_thread_raises_leaves_the_call(pair):
    main = threading.get_ident()

    def interrupt():
        while sys._current_frames()[main].f_code is not socket_call.__code__:
            time.sleep(0.001)
        kind = ctypes.py_object(TimeoutError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), kind)
        pair[1].sendall(b"x")

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(TimeoutError) as raised:
        socket_call(pair[0].recv, 1)
    thread.join()
    assert raised.type is TimeoutError


def test_the_errors_of_a_socket_have_classes_of_their_own(pair):
    here, there = pair
    here.settimeout(0.001)
    with pytest.raises(LinkTimeoutError, match="timed out"):
        socket_call(here.recv, 1)
    there.close()
    with pytest.raises(LinkError, match="Broken pipe") as raised:
        socket_call(here.send, b"x")
    assert not isinstance(raised.value, LinkTimeoutError)
    here.close()
    with pytest.raises(LinkError, match="Bad file descriptor"):
        socket_call(here.send, b"x")
    with pytest.raises(LinkError, match="negative"):  # a ValueError
        socket_call(select.poll().register, here)
    with pytest.raises(LinkError, match="refused"):
        open_socket(quiet_row(1), time.monotonic() + 60)
    for name in ("a..b", "x" * 80):
        with pytest.raises(UnknownNameError, match="not a valid name"):
            open_socket((name, 80), time.monotonic() + 60)


@every_class
def test_what_a_handler_raises_leaves_the_joining_of_a_job(coordinators, fresh_coordinator, error):
    """Where nothing listens, where no answer comes, where others are missing, and once that was
    logged."""
    place = fresh_coordinator(2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for address, warn_after_s in (
            (address_text(*quiet_row(1)), 60),
            (address_text(*silent.getsockname()), 60),
            (place, 60),
            (place, 0.01),
        ):
            with leaving(error):
                join(
                    address,
                    process=1,
                    num_processes=2,
                    token=coordinators.token,
                    timeout_s=60,
                    warn_after_s=warn_after_s,
                )


def test_what_a_handler_raises_leaves_the_start_of_an_agent(coordinators, monkeypatch):
    """Not as the agent's own failure, which would be sent to all."""
    member = coordinators.join_all(1)[0]
    host_agent = HostAgent("a job")
    silent = Spawned("timeit", "-n", "1", "import time; time.sleep(60)")
    monkeypatch.setattr(host_agent, "_spawn", lambda: silent)
    with leaving(OSError(5, "Input/output error")):
        limit = time.monotonic() + 60
        find_host_agent(host_agent, member, "", "127.0.0.1:1", limit, has_tls=False)
    silent.detach()
    member.close()
