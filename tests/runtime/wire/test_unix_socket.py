"""The second socket of a coordinator, for the calls of its own host."""

import sys

import pytest

from shoal.runtime.client import call_sockets
from shoal.runtime.rules.point import Point
from shoal.runtime.wire import frames
from shoal.runtime.wire.sockets import connect_unix, listen_unix

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such doors")


def meet_and_leave(members, run_all):
    meets = [lambda c=c: c.arrive(Point("p"), b"x", timeout_s=20) for c in members]
    met = run_all(*meets)
    for member in members:
        member.close()
    return met


def test_calls_of_the_same_host_need_no_tcp(coordinators, run_all, monkeypatch):
    members = coordinators.join_all(2)

    def refuse(*_arguments, **_options):
        raise AssertionError("a call took TCP")

    monkeypatch.setattr(call_sockets, "connect", refuse)
    assert meet_and_leave(members, run_all) == [{0: b"x", 1: b"x"}] * 2


def test_process_that_cannot_reach_the_unix_socket_uses_tcp(coordinators, run_all):
    members = coordinators.join_all(2)
    members[1]._calls._near = "shoal-of-another-host"
    assert meet_and_leave(members, run_all) == [{0: b"x", 1: b"x"}] * 2


def test_unix_socket_refuses_a_wrong_token(coordinators):
    members = coordinators.join_all(1)
    stranger = connect_unix(members[0].welcome.near)
    stranger.setblocking(True)
    stranger.settimeout(20)
    stranger.sendall(frames.pack_frame({"do": "observe", "nonce": "n"}))
    stranger.sendall(frames.pack_frame({"do": "proof", "proof": "a guess"}))
    answer = b""
    while part := stranger.recv(4096):
        answer += part
    stranger.close()
    assert b"the token is wrong" in answer
    members[0].close()


def test_each_unix_listener_has_its_own_name():
    with listen_unix() as first, listen_unix() as second:
        assert first.getsockname() != second.getsockname()
