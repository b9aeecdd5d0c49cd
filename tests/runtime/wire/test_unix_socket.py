"""The second door of a meeting place, for the calls of its own host."""

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


def test_calls_of_the_same_host_need_no_tcp(meeting_places, run_all, monkeypatch):
    members = meeting_places.join_all(2)

    def refuse(*_arguments, **_options):
        raise AssertionError("a call took TCP")

    monkeypatch.setattr(call_sockets, "connect", refuse)
    assert meet_and_leave(members, run_all) == [{0: b"x", 1: b"x"}] * 2


def test_who_does_not_find_the_door_takes_tcp(meeting_places, run_all):
    members = meeting_places.join_all(2)
    members[1]._calls._near = "shoal-of-another-host"
    assert meet_and_leave(members, run_all) == [{0: b"x", 1: b"x"}] * 2


def test_nobody_comes_in_without_the_token(meeting_places):
    members = meeting_places.join_all(1)
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


def test_two_doors_have_two_names():
    with listen_unix() as one, listen_unix() as other:
        assert one.getsockname() != other.getsockname()
