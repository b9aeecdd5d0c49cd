"""Invalid messages to the coordinator are refused, and harm only their sender."""

import pytest

from runtime.bare_sockets import BEAT, TOKEN, BareCoordinator
from shoal.runtime.rules.joining import PROTOCOL, refusal_of_row
from shoal.runtime.rules.point import Fingerprint, Point
from shoal.runtime.wire.frames import Frame, FrameError, FrameReader, pack_frame
from shoal.runtime.wire.proof import Introduction


@pytest.fixture
def coordinator():
    coordinator = BareCoordinator(3)
    yield coordinator
    coordinator.end()


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("serve", {"token": TOKEN, "name": "x", "host": "h"}),
        ("serve", {"token": TOKEN, "name": None, "host": "h", "pid": 1}),
        ("serve", {"token": TOKEN, "name": "x", "host": [], "pid": 1}),
        ("serve", {"token": TOKEN, "name": "x", "host": "h", "pid": True}),
        ("keep", {"token": TOKEN}),
        ("keep", {"token": TOKEN, "process": 0, "incarnation": "guessed"}),
        ("keep", {"token": TOKEN, "process": 1, "incarnation": "run 1"}),  # not the leader
        ("keep", {"token": TOKEN, "process": 99, "incarnation": "run 0"}),
        ("keep", {"token": TOKEN, "process": "0", "incarnation": "run 0"}),
        ("keep", {"token": TOKEN, "process": 2, "incarnation": "run 2"}),  # knows no host
        ("beat", {"token": TOKEN, **BEAT}),
        ("states", {"token": TOKEN, "stopped": [0], "ended": [0]}),
        ("stacks", {"token": TOKEN, "ticket": 1, "processes": None}),
        ("members", {"token": TOKEN, "ticket": 1}),
    ],
)
def test_a_stranger_is_thrown_out(coordinator, verb, fields):
    job = [coordinator.process(p, host_id="a" if p < 2 else "") for p in range(3)]
    assert {process.told()["is"] for process in job} == {"welcome"}
    assert coordinator.stranger(verb, **fields).told() is None
    assert coordinator.states() == ["here"] * 3
    assert coordinator.ask("members")["services"] == []


@pytest.mark.parametrize("verb", ["observe", "serve", "keep"])
def test_a_wrong_token_is_refused_whatever_comes_with_it(coordinator, verb):
    stranger = coordinator.stranger(verb, token="guessed", process=0, incarnation="x", name="x")
    told = stranger.told()
    assert told["is"] == "refused"
    assert "the token is wrong" in told["body"]
    assert stranger.told() is None


@pytest.mark.parametrize(
    ("verb", "fields"),
    [
        ("members", {}),
        ("members", {"ticket": "1"}),
        ("stacks", {"ticket": 1, "processes": [3]}),
        ("stacks", {"ticket": 1, "processes": [-1]}),
        ("stacks", {"ticket": 1, "processes": ["0"]}),
        ("stacks", {"ticket": 1, "processes": [True]}),
        ("stacks", {"ticket": 1, "processes": 0}),
        ("stacks", {"processes": None}),
        ("arrive", {"ticket": 1, "timeout_s": 1, "point": Point("x")}),
        ("failed", {}),
        ("bye", {}),
        ("beat", BEAT),
        ("states", {"stopped": [], "ended": []}),
    ],
)
def test_an_observer_may_only_look(coordinator, verb, fields):
    job = coordinator.job()
    observer = coordinator.stranger("observe", token=TOKEN)
    assert observer.told()["is"] == "welcome"
    observer.say(verb, **fields)
    assert observer.told() is None
    for process in job:
        process.beat()
    assert coordinator.states() == ["here"] * 3


def test_observers_host_agents_and_services_are_limited_to_small_frames(coordinator):
    job = coordinator.job()
    observer = coordinator.stranger("observe", token=TOKEN)
    observer.told()
    for client in (observer, coordinator.host_agent(job[0]), coordinator.service()):
        client.say("members", b"a body", ticket=1)
        while client.told() is not None:
            continue
    assert coordinator.states() == ["here"] * 3
    observer = coordinator.stranger("observe", token=TOKEN)
    observer.told()
    observer.say("members", ticket=1, padding="x" * (17 << 10))
    assert observer.told() is None


@pytest.mark.parametrize(
    "fields",
    [
        {"stopped": [0]},
        {"stopped": [0], "ended": None},
        {"stopped": [0], "ended": [2]},  # a process of another host
        {"stopped": [2], "ended": []},
        {"stopped": [99], "ended": []},
        {"stopped": [-1], "ended": []},
        {"stopped": ["1"], "ended": []},
        {"stopped": [True], "ended": []},
        {"stopped": {"1": 1}, "ended": []},
    ],
)
def test_invalid_states_of_a_host_agent_end_its_connection(coordinator, fields):
    job = [coordinator.process(p, host_id="a" if p < 2 else "b") for p in range(3)]
    assert {process.told()["is"] for process in job} == {"welcome"}
    host_agent = coordinator.host_agent(job[0])
    host_agent.say("states", **fields)
    assert host_agent.told() is None
    coordinator.turn(1.0, beating=(job[0], job[2]))
    assert coordinator.states() == ["here", "silent", "here"]


def test_host_agent_that_sends_another_message_is_disconnected(coordinator):
    job = coordinator.job()
    host_agent = coordinator.host_agent(job[0])
    host_agent.say("failed", b"")
    assert host_agent.told() is None
    assert coordinator.states() == ["here"] * 3


def test_a_service_that_breaks_the_protocol_is_lost(coordinator):
    job = coordinator.job()
    service = coordinator.service()
    service.say("members", ticket=1)
    assert service.told() is None
    told = job[0].told()
    assert (told["process"], told["state"]) == (None, "lost")
    assert "unknown verb 'members'" in told["body"]


@pytest.mark.parametrize(
    ("verb", "fields", "body", "words"),
    [
        ("beat", {**BEAT, "step": "3"}, b"", "field 'step' is not an integer"),
        ("beat", {**BEAT, "step": True}, b"", "field 'step' is not an integer"),
        ("beat", {**BEAT, "place": None}, b"", "field 'place' is not text"),
        ("beat", {**BEAT, "since_s": "1"}, b"", "field 'since_s' is not a number"),
        ("beat", {**BEAT, "step_s": []}, b"", "field 'step_s' is not a number"),
        ("beat", {**BEAT, "step_s": 10**400}, b"", "field 'step_s' is not a number"),
        ("beat", {**BEAT, "since_s": float("nan")}, b"", "field 'since_s' is not a number"),
        ("beat", {**BEAT, "memory_bytes": 0.5}, b"", "field 'memory_bytes' is not an integer"),
        ("beat", {}, b"", "is not a number"),
        ("stacks", {**BEAT, "ticket": 1}, b"in fit", "request 1, which was never sent"),
        ("stacks", {**BEAT, "ticket": -(10**30)}, b"in fit", "which was never sent"),
        ("stacks", {**BEAT, "ticket": None}, b"in fit", "field 'ticket' is not an integer"),
        ("stacks", {"ticket": 1}, b"in fit", "is not a number"),
        ("stacks", {**BEAT, "ticket": 1}, b"x" * ((1 << 20) + 1), "frame too large"),
        ("failed", {}, b"x" * ((1 << 20) + 1), "frame too large"),
        ("states", {"stopped": [], "ended": [0]}, b"", "unknown verb 'states'"),
        ("members", {"ticket": 1}, b"", "unknown verb 'members'"),
    ],
)
def test_a_process_that_breaks_the_protocol_is_lost_alone(coordinator, verb, fields, body, words):
    job = coordinator.job()
    job[1].say(verb, body, **fields)
    for process in (job[0], job[2]):
        told = process.told()
        assert (told["process"], told["state"]) == (1, "lost")
        assert words in told["body"]
    assert job[1].told() is None
    assert coordinator.states() == ["here", "lost", "here"]


def test_heartbeat_before_all_have_joined_ends_joining(coordinator):
    early = coordinator.process(0)
    early.say("beat", **BEAT)
    assert early.told() is None
    late = coordinator.process(1)
    assert refusal_of_row(late.told()["refusal"])[:3] == ("died", "", "process 0 (host0, pid 100)")


def test_an_arrival_must_say_its_step_and_whether_survivors_meet(coordinator):
    job = coordinator.job()
    for wrong in (
        {"step": "3", "point": Point("x")},
        {"step": 3, "point": Point("x", survivors=0)},
        {"step": 3, "point": Point("x", survivors="yes")},
        {"step": 3, "point": Point("x", follows=1)},
        {"step": 3, "point": Point("x", call_record=5)},
        {"step": 3, "point": Point("x")[:-1]},
        {"step": 3, "point": Point("x", fingerprint="barrier")},
        {"step": 3, "point": Point("x", fingerprint=Fingerprint("", "", 1))},
        {"step": 3, "point": Point("x", fingerprint=("", ""))},
    ):
        lane = coordinator.lane(job[0])
        lane.say("arrive", ticket=1, timeout_s=1, **wrong)
        assert lane.told() is None
    assert coordinator.states() == ["here"] * 3


def test_stacks_that_are_repeated_or_too_long_are_cut(coordinator):
    job = coordinator.job()
    coordinator.observer.say("stacks", ticket=70, processes=[0])
    ticket = job[0].told()["ticket"]
    for _ in range(3):
        job[0].say("stacks", b"x" * (1 << 20), ticket=ticket, **BEAT)
    told = coordinator.observer.told()
    assert told["ticket"] == 70
    assert len(told["body"]) < (64 << 10) + 100
    job[0].beat()
    assert coordinator.states() == ["here"] * 3


def test_hello_of_an_earlier_protocol_is_refused_as_such(coordinator):
    old = coordinator.stranger()
    hello = {
        "do": "hello", "protocol": 1, "token": TOKEN, "process": 0, "processes": 3, "host": "h",
        "pid": 1, "incarnation": "x", "versions": "", "jax_service": "", "timeout_s": 10,
    }  # fmt: skip
    old.socket.sendall(pack_frame(hello))
    told = old.told()
    assert told["is"] == "refused"
    assert "another version of shoal; install the same one everywhere" in told["body"]


@pytest.mark.parametrize("fields", [{}, {"nonce": 7}])
def test_a_first_frame_without_a_nonce_is_refused_as_of_another_version(coordinator, fields):
    stranger = coordinator.stranger()
    stranger.say("observe", **fields)
    assert "another version of shoal" in stranger.told()["body"]
    assert stranger.told() is None


@pytest.mark.parametrize("proof", ["", "00", 7, None, "\ud800", [1]])
def test_a_wrong_proof_is_refused_and_the_server_proves_nothing(coordinator, proof):
    stranger = coordinator.stranger()
    stranger.say("observe", nonce="mine")
    challenge = stranger.told()
    assert challenge["is"] == "challenge"
    stranger.say("proof", proof=proof)
    told = stranger._receive()
    assert told.header["is"] == "refused"
    assert b"the token is wrong" in told.body
    assert stranger.told() is None


def test_a_recorded_connection_proves_nothing(coordinator):
    """Everything that an observer sent is sent again, and its challenge's proof for another."""
    introduction = Introduction(TOKEN)
    first = introduction.first_frame({"do": "observe"})
    observer = coordinator.stranger()
    observer.socket.sendall(first)
    proof = introduction.answer(observer.receive())
    observer.socket.sendall(proof)
    assert observer.told()["is"] == "welcome"
    replayed = coordinator.stranger()
    replayed.socket.sendall(first + proof)
    assert replayed.told()["is"] == "challenge"
    assert "the token is wrong" in replayed.told()["body"]
    assert coordinator.states() == ["absent"] * 3


def test_a_proof_cannot_be_sent_back(coordinator):
    """A server that has no secret passes a client's proof on as its own."""
    introduction = Introduction(TOKEN)
    introduction.first_frame({"do": "observe"})
    sent = introduction.answer(Frame({"is": "challenge", "nonce": "n"}, b""))
    reader = FrameReader(max_header_bytes=1 << 10, max_body_bytes=0)
    reader.feed(sent)
    with pytest.raises(FrameError, match="does not know the token"):
        introduction.check(Frame({"is": "proof", "proof": reader.next().header["proof"]}, b""))


@pytest.mark.parametrize("protocol", [1, PROTOCOL - 1, PROTOCOL + 1, 99])
def test_hello_of_another_protocol_is_refused_as_such(coordinator, protocol):
    told = coordinator.process(0, protocol=protocol).told()
    assert told["is"] == "refused"
    (problem,) = refusal_of_row(told["refusal"]).problems
    assert (problem.what, problem.given, problem.wanted) == (
        "protocol",
        str(protocol),
        str(PROTOCOL),
    )
    assert "another version of shoal; install the same one everywhere" in told["body"]


@pytest.mark.parametrize("wrong", [{"timeout_s": 10**400}, {"host": "\ud800"}])
def test_coordinator_survives_a_malformed_hello(coordinator, wrong):
    told = coordinator.process(7, **wrong).told()
    assert told is None or told["is"] == "refused"
    assert coordinator.states() == ["absent"] * 3


def test_a_service_without_a_name_in_letters_can_be_lost_while_a_job_is_joining(coordinator):
    waiting = coordinator.process(0)
    coordinator.service("\ud800").close()
    told = waiting.told()
    assert (told["is"], told["refusal"][2].partition(" is lost")[0]) == ("refused", "\ud800")


def test_deeply_nested_lanes_in_a_call_record_are_harmless(coordinator):
    job = coordinator.job()
    point = Point("x", call_record="\n" + "[" * 50_000 + "\t\t1:aa")
    lanes = [coordinator.lane(process) for process in job]
    for lane in lanes:
        lane.say("arrive", point=point, timeout_s=10)
    assert [lane.told()["is"] for lane in lanes] == ["ok"] * 3


def test_failed_process_that_abandons_a_call_still_gets_an_answer(coordinator):
    job = coordinator.job()
    lane = coordinator.lane(job[0])
    job[0].say("failed", b"ValueError: no data")
    left = {"point": Point("x"), "arrivals": 0, "sent": 0, "number": 1}
    job[0].say("abandon", b"KeyboardInterrupt", **left)
    lane.say("arrive", point=Point("x"), timeout_s=10, after=1)
    assert lane.told()["is"] == "failed"


def test_arrivals_after_what_never_comes_are_kept_one_for_each_connection(coordinator):
    job = coordinator.job()
    lane = coordinator.lane(job[0])
    for name in ("a", "b"):
        lane.say("arrive", bytes(1000), point=Point(name), timeout_s=10, after=7)
    assert lane.told() is None
    assert coordinator.states() == ["here"] * 3
