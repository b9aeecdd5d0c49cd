"""A connection that is being opened does not outlive the pool of which it is."""

import contextlib
import socket
import threading
import time

import pytest

from shoal.errors import ProcessLostError
from shoal.runtime.client.call_sockets import Calls, Closed
from shoal.runtime.client.outcomes import ThisProcess

TOKEN = "0" * 32


@contextlib.contextmanager
def unanswered(*, connects):
    """Make an address that answers nothing: not even SYN, as behind a cut, or nothing after it."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(0 if connects else 2):  # they fill its queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()


@pytest.mark.parametrize("connects", [False, True])
def test_a_call_that_opens_a_connection_ends_with_the_pool(connects):
    with unanswered(connects=connects) as (host, port):
        me = ThisProcess(1, ("a", "b"))
        calls = Calls(
            f"{host}:{port}", "", {}, TOKEN, me, max_body_bytes=1 << 20, lose=lambda reason: None
        )
        errors = []

        def call():
            try:
                calls.run("members()", time.monotonic() + 600, lambda channel: None)
            except ProcessLostError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        calls.close_all(Closed(ProcessLostError, "the coordinator is lost"))
        thread.join(20)
        assert errors == ["process 1 of 2 (b): members(): the coordinator is lost"]
