"""Real gatherers, one for each of two hosts: when one ends or stops, who is lost is named."""

import os
import select
import signal
import socket
import struct
import time

import pytest

from runtime.bare_sockets import TOKEN, Place
from runtime.coordinator_contract import PATIENCE_S, run_together
from shoal.errors import DeadlineError, DivergenceError, InitializeError, ProcessLostError
from shoal.runtime.client.over_tcp import join
from shoal.runtime.gatherer import host_gatherer
from shoal.runtime.gatherer.host_gatherer import HostGatherer
from shoal.runtime.rules.point import Point
from shoal.runtime.wire import unix_socket
from shoal.runtime.wire.frames import FrameError
from shoal.runtime.wire.unix_socket import listen_unix

LONG_S = 60.0  # a deadline that no test here waits for
LOST_AFTER_S = 1.0
HOSTS = ("a", "a", "b", "b")


class TwoHosts:
    """A job of four processes, threads of this one, on two hosts with a gatherer each."""

    def __init__(self, address, token):
        self.nearby = {host: HostGatherer(address, token, host=host) for host in {*HOSTS}}
        self.pids = {host: self.pid(host) for host in self.nearby}
        self.coordinators = run_together(*(
            lambda p=p, host=host: join(
                address, process=p, num_processes=len(HOSTS), token=token, timeout_s=PATIENCE_S,
                host=host, host_id=host, nearby=self.nearby[host],
            )
            for p, host in enumerate(HOSTS)
        ))  # fmt: skip

    def pid(self, host):
        """Return the process that listens at a gatherer's socket, started if need be."""
        with self.nearby[host].connect(time.monotonic() + PATIENCE_S) as sock:
            size = struct.calcsize("iII")
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return struct.unpack("iII", credentials)[0]

    def arrive(self, *processes, timeout_s=LONG_S, **more):
        """Let processes arrive at a point, all at a time; return what each gets."""
        point = {"name": "x", **more}
        return run_together(*(
            lambda c=self.coordinators[p]: dict(c.arrive(Point(**point), timeout_s=timeout_s))
            for p in processes
        ))  # fmt: skip


@pytest.fixture
def start_hosts(meeting_places, monkeypatch):
    """Return a function that starts a job; its processes are lost after so many silent seconds."""
    started = []

    def start(lost_after_s):
        monkeypatch.setitem(meeting_places._env, "SHOAL_LOST_AFTER_S", str(lost_after_s))
        monkeypatch.setitem(meeting_places._env, "SHOAL_HEARTBEAT_S", "0.2")
        server, address = meeting_places.start(len(HOSTS), "--until-stdin-closes")
        started.append((server, TwoHosts(address, meeting_places.token)))
        return started[-1][1]

    yield start
    for server, hosts in started:
        for coordinator in hosts.coordinators:
            coordinator.close()
        for pid in hosts.pids.values():
            wait_for_the_end(pid)
        server.stdin.close()
        assert server.wait(PATIENCE_S) == 0
        server.stdout.close()


@pytest.fixture
def two_hosts(start_hosts):
    return start_hosts(PATIENCE_S)


def wait_for_the_end(pid):
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(handle, signal.SIGCONT)
        ready, _, _ = select.select([handle], [], [], PATIENCE_S)
    finally:
        os.close(handle)
    assert ready, "a gatherer goes on without its processes"


def test_processes_of_several_hosts_meet_and_their_gatherers_end_with_them(two_hosts):
    assert two_hosts.pids["a"] != two_hosts.pids["b"]
    for _ in range(3):
        assert two_hosts.arrive(0, 1, 2, 3) == [dict.fromkeys(range(4), b"")] * 4
    assert two_hosts.arrive(1, 2, group=(1, 2)) == [{1: b"", 2: b""}] * 2
    assert two_hosts.coordinators[3].hosts == HOSTS
    assert [c.leader for c in two_hosts.coordinators] == [0, 0, 2, 2]
    assert [len(c.keeps) for c in two_hosts.coordinators] == [2, 0, 2, 0]


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "its connection closed"), (signal.SIGSTOP, "silent")]
)
def test_a_gatherer_takes_only_the_processes_of_its_host_with_it(start_hosts, number, words):
    two_hosts = start_hosts(LOST_AFTER_S)
    first = two_hosts.coordinators[0]
    first.members(timeout_s=LONG_S)
    os.kill(two_hosts.pids["b"], number)
    errors = two_hosts.arrive(0, 1)
    for error in errors:
        assert type(error) is ProcessLostError, error
        assert set(error.lost) & {2, 3}
        assert "the gatherer of its host is lost" in str(error)
        assert words in str(error)
    assert {member.state for member in first.members(timeout_s=LONG_S)[:2]} == {"here"}
    for error in two_hosts.arrive(2, 3):
        assert type(error) is ProcessLostError, error
        assert "through the gatherer of this host is lost" in str(error)
    alive = two_hosts.arrive(0, 1, name="live", survivors=True)
    assert alive == [{0: b"", 1: b""}] * 2
    assert two_hosts.arrive(0, 1, group=(0, 1)) == [{0: b"", 1: b""}] * 2


def test_who_is_missing_is_named_by_process_and_the_others_of_its_host_wait(two_hosts):
    errors = two_hosts.arrive(0, 2, 3, timeout_s=0.5)
    assert [type(error) for error in errors] == [DeadlineError] * 3
    assert {error.missing for error in errors} == {(1,)}
    (late,) = two_hosts.arrive(1)
    assert type(late) is DeadlineError
    assert two_hosts.arrive(0, 1, 2, 3) == [dict.fromkeys(range(4), b"")] * 4


def test_processes_of_one_host_that_differ_are_told_apart(two_hosts):
    points = [Point("x", fingerprint=text) for text in ("f", "g", "f", "f")]
    errors = run_together(*(
        lambda c=c, point=point: c.arrive(point, timeout_s=LONG_S)
        for c, point in zip(two_hosts.coordinators, points, strict=True)
    ))  # fmt: skip
    assert [type(error) for error in errors] == [DivergenceError] * 4
    assert two_hosts.arrive(0, 1, 2, 3) == [dict.fromkeys(range(4), b"")] * 4


def test_a_process_that_dies_is_lost_alone(two_hosts):
    two_hosts.coordinators[1]._life.shut()  # as the kernel does when it is killed
    errors = two_hosts.arrive(0, 2, 3)
    assert [type(error) for error in errors] == [ProcessLostError] * 3
    assert {tuple(error.lost) for error in errors} == {(1,)}
    assert "gatherer" not in str(errors[0])
    alive = two_hosts.arrive(0, 2, 3, name="live", survivors=True)
    assert alive == [{0: b"", 2: b"", 3: b""}] * 3


@pytest.mark.parametrize("gathered", [False, True])
def test_who_cannot_join_learns_the_same_through_a_gatherer(gathered, fresh_place, free_address):
    def refusal(address, token):
        nearby = HostGatherer(address, token) if gathered else None
        if nearby is not None:  # starting it may take longer than the processes wait below
            nearby.connect(time.monotonic() + PATIENCE_S).close()
        with pytest.raises(InitializeError) as caught:
            join(address, process=0, num_processes=2, token=token, timeout_s=0.5, nearby=nearby)
        return str(caught.value)

    assert "nothing listens there" in refusal(free_address, "any")
    assert "Connection refused" in refusal(free_address, "any")
    assert "the token is wrong: SHOAL_TOKEN must be the one" in refusal(fresh_place(2), "wrong")


def join_all(address, token, nearby):
    """Let as many processes join as there are gatherers to join through, each by its own."""
    return run_together(*(
        lambda p=p, one=one: join(
            address, process=p, num_processes=len(nearby), token=token, timeout_s=PATIENCE_S,
            nearby=one,
        )
        for p, one in enumerate(nearby)
    ))  # fmt: skip


def test_of_many_processes_that_come_at_once_one_starts_the_gatherer(
    fresh_place, meeting_places, monkeypatch
):
    started = []

    class Counted(host_gatherer.Spawned):
        def __init__(self, *command):
            super().__init__(*command)
            started.append(self.pid)

    monkeypatch.setattr(host_gatherer, "Spawned", Counted)
    address, token = fresh_place(6), meeting_places.token
    coordinators = join_all(address, token, [HostGatherer(address, token) for _ in range(6)])
    assert [c.welcome.is_gathered for c in coordinators] == [True] * 6
    for coordinator in coordinators:
        coordinator.close()
    assert len(started) == 1


def test_the_others_wait_for_the_one_that_starts_the_gatherer_and_no_longer():
    nearby = HostGatherer("10.0.0.1:80", "token")
    with listen_unix(f"{nearby.name}-starting") as starting:
        with pytest.raises(TimeoutError, match="another process of this host is starting it"):
            nearby.connect(time.monotonic())
        starting.accept()[0].close()

        def start():
            select.select([starting], [], [], PATIENCE_S)  # until the other waits
            with listen_unix(nearby.name) as server:
                starting.close()
                return server.accept()[0]

        ends = run_together(start, lambda: nearby.connect(time.monotonic() + LONG_S))
    assert ends[0].getsockname() == ends[1].getpeername()
    for end in ends:
        end.close()


def test_users_have_gatherers_of_their_own(monkeypatch):
    ours = HostGatherer("10.0.0.1:80", "token")
    assert HostGatherer("10.0.0.1:80", "token").name == ours.name
    monkeypatch.setattr(host_gatherer.os, "geteuid", lambda: 10**6)
    assert HostGatherer("10.0.0.1:80", "token").name != ours.name


@pytest.mark.parametrize("name", ["{}", "{}-starting"])
def test_where_the_name_of_a_gatherer_is_anothers_a_process_joins_without(
    fresh_place, meeting_places, monkeypatch, shoal_log, name
):
    address, token = fresh_place(1), meeting_places.token
    nearby = HostGatherer(address, token)
    with listen_unix(name.format(nearby.name)):
        monkeypatch.setattr(unix_socket, "_owner", lambda _sock: 10**6)
        (coordinator,) = join_all(address, token, [nearby])
        assert not coordinator.welcome.is_gathered
        assert coordinator.arrive(Point("x"), timeout_s=LONG_S) == {0: b""}
        coordinator.close()
    assert any("joins the job without a gatherer" in line for _, line in shoal_log.lines)


def test_a_meeting_place_that_knows_no_gatherers_says_itself_what_is_wrong():
    place = Place(2)
    take = place._place.on_frame

    def take_as_before(connection, frame):
        if frame.header["do"] == "trunk":
            raise FrameError("'trunk' from an unidentified connection")
        take(connection, frame)

    place._place.on_frame = take_as_before
    place.process(0)
    with pytest.raises(InitializeError) as caught:
        join(
            place.address, process=1, num_processes=2, token=TOKEN, timeout_s=PATIENCE_S,
            versions="shoal of today", nearby=HostGatherer(place.address, TOKEN),
        )  # fmt: skip
    assert "runs shoal of today" in str(caught.value)
    place.end()


@pytest.fixture
def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # it never listens
        yield f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_gatherer_that_cannot_start_is_said(fresh_place, monkeypatch):
    monkeypatch.setattr(host_gatherer, "_MODULE", "shoal.no_such_module")
    address = fresh_place(2)
    nearby = HostGatherer(address, "any")
    with pytest.raises(InitializeError) as caught:
        join(address, process=0, num_processes=2, token="any", timeout_s=0.2, nearby=nearby)
    assert "the gatherer of this host cannot be reached" in str(caught.value)
    assert "did not start" in str(caught.value)
