"""The client's end of a connection: how long it waits."""

import math
import socket
import threading
import time

import pytest

from shoal.errors import DeadlineError
from shoal.runtime.client import call_sockets
from shoal.runtime.wire import connection
from shoal.runtime.wire.connection import Channel, connect
from shoal.runtime.wire.frames import FrameReader, pack_frame
from shoal.runtime.wire.socket_calls import LinkTimeoutError


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours, max_body_bytes=100), theirs


def test_a_wait_that_is_longer_than_one_poll_may_last_goes_on(pair, monkeypatch):
    here, there = pair
    looks = []

    def monotonic(now=time.monotonic):
        looks.append(None)
        if len(looks) == 20:
            there.sendall(pack_frame({"is": "late"}))
        return now()

    monkeypatch.setattr(connection, "_DAY_S", 0.001)
    monkeypatch.setattr(connection.time, "monotonic", monotonic)
    assert here.receive(time.monotonic() + 60).header == {"is": "late"}


def test_what_came_before_the_limit_is_read_after_it(pair):
    here, there = pair
    there.sendall(pack_frame({"is": "there"}))
    assert here.receive(time.monotonic() - 1).header == {"is": "there"}
    with pytest.raises(TimeoutError, match="timed out"):
        here.receive(time.monotonic() - 1)


@pytest.mark.parametrize("ends", [TimeoutError, KeyboardInterrupt])
def test_half_a_frame_is_no_end_of_the_conversation(pair, monkeypatch, ends):
    here, there = pair
    there.settimeout(60)
    large = pack_frame({"is": "large"}, bytes(1 << 22))
    with monkeypatch.context() as patched:
        if ends is KeyboardInterrupt:
            patched.setattr(connection, "_wait", lambda *_: exec("raise KeyboardInterrupt"))
        for word in (large, pack_frame({"is": "not said"})):
            with pytest.raises(ends):
                here.send(word, time.monotonic() - 1)
    reader = FrameReader(max_header_bytes=100, max_body_bytes=1 << 22)
    sending = threading.Thread(
        target=here.send, args=(pack_frame({"is": "said"}), time.monotonic() + 60), daemon=True
    )
    sending.start()
    heard = []
    while len(heard) < 2:
        reader.feed(there.recv(1 << 20))
        while (frame := reader.next()) is not None:
            heard.append(frame.header["is"])
    sending.join(60)
    assert heard == ["large", "said"]


@pytest.mark.parametrize("limit", [math.inf, 1e11])
def test_a_limit_may_be_far_away(limit):
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = []
        accepting = threading.Thread(target=lambda: there.append(server.accept()[0]))
        accepting.start()
        here = connect(server.getsockname(), limit, max_body_bytes=100)
        accepting.join()
        there[0].sendall(pack_frame({"is": "there"}))
        assert here.receive(limit).header == {"is": "there"}
        here.close()
        there[0].close()


def test_a_question_that_no_connection_comes_up_for_is_late_and_loses_nothing(
    coordinators, monkeypatch
):
    members = coordinators.join_all(2)
    members[0]._calls._near = ""

    def refuse(*_arguments, **_options):
        raise LinkTimeoutError("timed out")

    with monkeypatch.context() as patch:
        patch.setattr(call_sockets, "connect", refuse)
        for ask in (members[0].members, members[0].stacks):
            with pytest.raises(DeadlineError, match="did not answer within"):
                ask(timeout_s=0.5)
    assert len(members[0].members(timeout_s=20)) == 2
    for member in members:
        member.close()
