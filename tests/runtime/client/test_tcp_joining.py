"""Joining a real coordinator: whatever is wrong is an InitializeError on all, never a hang."""

import contextlib
import os
import socket
import time
from threading import Thread

import pytest

from runtime.bare_sockets import Bare
from shoal.errors import InitializeError, PeerFailedError, ProcessLostError, UsageError
from shoal.runtime.client.hello import host_id
from shoal.runtime.client.over_tcp import join
from shoal.runtime.rules.deadline import Allowance
from shoal.runtime.rules.joining import PROTOCOL, Refusal
from shoal.runtime.rules.point import Departure, Point
from shoal.runtime.wire.frames import address_text, pack_frame, split_address


@pytest.fixture
def come(coordinators, run_all):
    """Return a function that lets processes join at once; closes those that came in."""
    made = []

    def come(address, processes, *rows):
        options = {"num_processes": processes, "token": coordinators.token, "timeout_s": 10.0}
        results = run_all(*(lambda r=row: join(address, **{**options, **r}) for row in rows))
        made.extend(result for result in results if not isinstance(result, BaseException))
        return results

    yield come
    for client in made:
        client.close()


def test_all_learn_the_hosts_and_the_address_of_jax(fresh_coordinator, come):
    rows = [{"process": p, "host": f"host{p}"} for p in range(3)]
    rows[2]["jax_service"] = "10.0.0.9:1234"
    for client in come(fresh_coordinator(3), 3, *rows):
        assert client.hosts == ("host0", "host1", "host2")
        assert client.jax_service == "10.0.0.9:1234"
    told = come(fresh_coordinator(1, "--jax-service", "10.0.0.9:5"), 1, {"process": 0})
    assert told[0].jax_service == "10.0.0.9:5"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"process": 0}, {"process": 1, "num_processes": 3}], "has 3 processes"),
        ([{"process": 0}, {"process": 0}], "two processes have the index 0"),
        ([{"process": 0}, {"process": 2}], "the job has processes 0..1"),
        (
            [{"process": 0, "versions": "a 1"}, {"process": 1, "versions": "a 2"}],
            "runs a ",
        ),
    ],
)
def test_invalid_hello_of_one_process_raises_on_all_at_once(fresh_coordinator, come, rows, words):
    started = time.monotonic()
    errors = come(fresh_coordinator(2), 2, *rows)
    assert time.monotonic() - started < 8  # of the 10 they had given themselves
    for row, error in zip(rows, errors, strict=True):
        assert type(error) is InitializeError
        assert words in str(error)
        count = row.get("num_processes", 2)
        assert str(error).startswith(f"process {row['process']} of {count} (")


def test_missing_processes_are_named_on_all_at_the_earliest_deadline(fresh_coordinator, come):
    address = fresh_coordinator(3)
    rows = [{"process": 0, "timeout_s": 60.0}, {"process": 2, "timeout_s": Allowance(0.3, 4.0)}]
    errors = come(address, 3, *rows)
    assert [type(error) for error in errors] == [InitializeError] * 2
    assert [error.missing for error in errors] == [(1,)] * 2
    assert "process 1 of 3 did not join within 4 s (the deadline of process 2)" in str(errors[0])


def test_after_a_refusal_all_may_try_again(fresh_coordinator, come):
    address = fresh_coordinator(2)
    come(address, 2, {"process": 0}, {"process": 1, "num_processes": 3})
    [first, second] = come(address, 2, {"process": 0}, {"process": 1})
    assert first.num_processes == second.num_processes == 2


def test_death_of_a_process_while_joining_ends_joining_for_later_ones(fresh_coordinator, come):
    address = fresh_coordinator(3)
    hello = {
        "protocol": PROTOCOL, "process": 1,
        "processes": 3, "host": "far", "pid": 7, "incarnation": "x", "versions": "",
        "jax_service": "", "timeout_s": 10, "host_id": "",
    }  # fmt: skip
    victim = Bare(address)
    victim.say("hello", token="the secret of the tests", **hello)
    victim.close()
    [error] = come(address, 3, {"process": 0, "versions": ""})
    assert type(error) is InitializeError
    assert error.missing == (1,)
    assert "process 1 (far, pid 7) died or gave up" in str(error)


def test_a_wrong_token_is_refused_alone_and_the_right_one_still_gets_in(fresh_coordinator, come):
    address = fresh_coordinator(1)
    [error] = come(address, 1, {"process": 0, "token": "wrong"})
    assert type(error) is InitializeError
    assert "the token is wrong" in str(error)
    assert come(address, 1, {"process": 0})[0].num_processes == 1


def test_token_never_appears_on_the_wire(fresh_coordinator, come):
    """A relay between a process and the coordinator records both directions."""
    place, recorded = split_address(fresh_coordinator(1)), []

    def pass_on(source, sink):
        with contextlib.suppress(OSError):  # either end may go first
            while data := source.recv(1 << 16):
                recorded.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def relay(server):
        while True:
            try:
                near = server.accept()[0]
            except OSError:
                return
            far = ends.enter_context(socket.create_connection(place))
            ends.enter_context(near)
            for pair in ((near, far), (far, near)):
                Thread(target=pass_on, args=pair, daemon=True).start()

    with contextlib.ExitStack() as ends, socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=relay, args=(server,), daemon=True).start()
        [member] = come(address_text(*server.getsockname()[:2]), 1, {"process": 0})
        member._calls._near = ""  # not by the Unix socket
        assert member.arrive(Point("on"), timeout_s=20) == {0: b""}
        member.close()
    wire = b"".join(recorded)
    assert wire.count(b'"proof"') >= 4  # of the process's life and of its calls, by both ends
    assert b"the secret of the tests" not in wire


def test_a_duplicate_is_refused_alone_once_the_job_is_complete(fresh_coordinator, come, run_all):
    address = fresh_coordinator(2)
    members = come(address, 2, {"process": 0}, {"process": 1})
    [error] = come(address, 2, {"process": 1})
    assert type(error) is InitializeError
    assert "the job is complete: process 1 (" in str(error)
    meets = [lambda c=c: len(c.arrive(Point("on"), timeout_s=20)) for c in members]
    assert run_all(*meets) == [2, 2]


def test_process_can_join_the_next_job_while_others_are_still_in_the_last(
    fresh_coordinator, come, run_all
):
    address = fresh_coordinator(2)
    old = come(address, 2, {"process": 0}, {"process": 1})
    for _ in range(3):
        old[0].close()
        rejoins = [lambda p=p: come(address, 2, {"process": p})[0] for p in range(2)]

        def follow(old=old, rejoin=rejoins[1]):
            with pytest.raises(PeerFailedError, match="left the job"):
                old[1].arrive(Point("x"), timeout_s=20)  # the last job still answers
            old[1].close()
            return rejoin()

        new = run_all(rejoins[0], follow)
        meets = [lambda c=c: len(c.arrive(Point("on"), timeout_s=20)) for c in new]
        assert run_all(*meets) == [2, 2]
        old = new


def test_joining_the_next_job_waits_until_the_last_coordinator_has_ended(fresh_coordinator, come):
    address = fresh_coordinator(2, "--until-empty")
    first, second = come(address, 2, {"process": 0}, {"process": 1})
    first.close()
    [error] = come(address, 2, {"process": 0, "timeout_s": 0.3})
    assert type(error) is InitializeError
    assert "an earlier job is still ending there" in str(error)
    second.close()


def test_missing_listener_is_reported_at_the_deadline(come):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address_text(*server.getsockname()[:2])
    [error] = come(address, 2, {"process": 1, "timeout_s": 0.2})
    assert type(error) is InitializeError
    assert f"process 1 of 2 ({socket.gethostname()}): cannot join the job at {address}: " in str(
        error
    )
    assert "nothing listens there; tried for 0.2 s" in str(error)


def test_silent_or_foreign_service_is_reported(come, run_all):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address_text(*server.getsockname()[:2])
        [error] = come(address, 1, {"process": 0, "timeout_s": 0.2})
        assert "did not answer within 0.2 s" in str(error)
        server.accept()[0].close()

        def answer():
            with server.accept()[0] as client:
                client.recv(1 << 16)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        _, [error] = run_all(answer, lambda: come(address, 1, {"process": 0}))
        assert type(error) is InitializeError
        assert "is not a coordinator" in str(error)


OF_THE_SERVER = Refusal("given", words="no token at h\udcff")


@pytest.mark.parametrize(
    ("refusal", "body", "words"),
    [
        ([*Refusal("late"), "a later field"], b"another version", "8476: another version"),
        (None, b"another version", "8476: another version"),
        (OF_THE_SERVER, b"", "8476: no token at h?"),
        (Refusal("of tomorrow"), b"", "it is another version of shoal"),
    ],
)
def test_a_refusal_of_another_version_is_what_its_body_says(come, run_all, refusal, body, words):
    """Also with text that no terminal takes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address_text(*server.getsockname()[:2])

        def answer():
            with server.accept()[0] as client:
                client.recv(1 << 16)
                header = (
                    {"is": "refused"} if refusal is None else {"is": "refused", "refusal": refusal}
                )
                client.sendall(pack_frame(header, body))

        _, [error] = run_all(answer, lambda: come(address, 1, {"process": 0}))
    assert type(error) is InitializeError
    assert words.replace("8476", str(split_address(address)[1])) in str(error)
    assert str(error).encode()


@pytest.mark.parametrize(
    ("address", "options"),
    [("nowhere", {}), ("h:1", {"process": -1}), ("h:1", {"num_processes": 0}),
     ("h:1", {"timeout_s": 0.0})],
)  # fmt: skip
def test_invalid_arguments_are_refused_before_connecting(come, address, options):
    [error] = come(address, 2, {"process": 0, **options})
    assert type(error) is UsageError


def test_hostile_bytes_do_not_hurt_a_job(fresh_coordinator, come, run_all):
    address = fresh_coordinator(2)
    members = come(address, 2, {"process": 0}, {"process": 1})
    host, port = address.rsplit(":", 1)
    for verb, fields in (
        ("lane", {"process": 0, "incarnation": "guessed"}),
        ("bye", {"process": 0}),
        ("hello", {"process": "0"}),
    ):
        stranger = Bare(address)
        stranger.say(verb, token="the secret of the tests", **fields)
        assert stranger.told() is None
        stranger.close()
    for hostile in (
        b"GET / HTTP/1.1\r\n\r\n",
        pack_frame({"do": "arrive", "token": ""}),
        pack_frame({"do": "hello", "nonce": "\ud800", "proof": "\ud800"}),
        pack_frame({})[:9],
    ):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(hostile)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(20)
            try:
                while stranger.recv(1 << 16):
                    pass
            except ConnectionResetError:
                continue
    meets = [lambda c=c: len(c.arrive(Point("on"), timeout_s=20)) for c in members]
    assert run_all(*meets) == [2, 2]


def test_a_member_that_breaks_the_protocol_is_lost_alone(fresh_coordinator, come):
    first, second = come(fresh_coordinator(2), 2, {"process": 0}, {"process": 1})
    second._life.send(pack_frame({"do": "nonsense"}), float("inf"))
    with pytest.raises(ProcessLostError, match="unknown verb 'nonsense'"):
        first.arrive(Point("x"), timeout_s=20)


def test_process_declared_lost_raises_in_its_wait(fresh_coordinator, come, run_all):
    first, second = come(fresh_coordinator(2), 2, {"process": 0}, {"process": 1})

    def declare():
        while not first.members(timeout_s=20)[1].is_waiting:
            pass
        # What the watcher does when the coordinator reports it.
        reason = "silent for 60 s; last at 'x'"
        second.on_declared_lost(Departure(reason, "lost", why="silent for 60 s"))

    _, error = run_all(declare, lambda: _error_of(lambda: second.arrive(Point("x"), timeout_s=20)))
    assert type(error) is ProcessLostError
    assert error.lost == {1: "silent for 60 s; last at 'x'"}
    assert error.ends[1].why == "silent for 60 s"
    assert "this process was declared lost: silent for 60 s; last at 'x'; others" in str(error)
    with pytest.raises(ProcessLostError, match="declared lost"):
        second.check("step 3")


def _error_of(call):
    with pytest.raises(ProcessLostError) as caught:
        call()
    return caught.value


def test_the_leader_of_a_host_knows_its_processes(fresh_coordinator, come):
    rows = [{"process": p, "host_id": host} for p, host in enumerate(["a", "b", "a", ""])]
    clients = come(fresh_coordinator(4), 4, *rows)
    assert [c.leader for c in clients] == [0, 1, 0, 3]
    assert [set(c.keeps) for c in clients] == [{0, 2}, {1}, set(), set()]
    assert set(clients[0].keeps.values()) == {os.getpid()}


def test_processes_of_this_host_find_each_other(fresh_coordinator, come):
    first, second = come(fresh_coordinator(2), 2, {"process": 0}, {"process": 1})
    assert (first.leader, second.leader) == ((0, 0) if host_id() else (0, 1))


def test_a_long_wait_for_others_is_logged_once(fresh_coordinator, come, run_all, shoal_log):
    address = fresh_coordinator(3)
    early = {"process": 1, "host": "early", "warn_after_s": 0.05}

    def come_later():
        assert shoal_log.has_line.wait(60)
        return come(address, 3, {"process": 0}, {"process": 2})

    (first,), others = run_all(lambda: come(address, 3, early), come_later)
    assert [c.process for c in (first, *others)] == [1, 0, 2]
    assert shoal_log.lines == [
        ("WARNING", "process 1 of 3 (early) has waited 0 s to join the job: "
         "missing: processes 0, 2")
    ]  # fmt: skip


def test_long_wait_for_a_coordinator_is_logged(shoal_log):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = address_text(*taken.getsockname()[:2])
    with pytest.raises(InitializeError, match="nothing listens there"):
        join(address, process=0, num_processes=2, timeout_s=0.5, warn_after_s=0.05)
    [(level, line)] = shoal_log.lines
    assert level == "WARNING"
    assert line.endswith(f"to join the job: {address}: nothing listens there")
