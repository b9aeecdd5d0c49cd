"""What the coordinator says to bare sockets, under a clock that the test turns."""

import json
import select
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.bare_sockets import BEAT, LIMITS, PATIENCE_S, TOKEN, BareCoordinator, Process
from shoal.runtime.failures.program_text import program_warning
from shoal.runtime.rules.joining import hosts_of, refusal_of_row
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.programs import differences_of
from shoal.runtime.server.coordinator import Coordinator


@pytest.fixture
def open_coordinator():
    coordinators = []

    def start(processes, **more):
        coordinators.append(BareCoordinator(processes, **more))
        return coordinators[-1]

    yield start
    for coordinator in coordinators:
        coordinator.end()


def gone(process, state, words, name=None, **more):
    name = name or f"process {process} (host{process})"
    return {"is": "gone", "process": process, "name": name, "state": state, "body": words, **more}


def test_welcome_has_the_heartbeat_period_and_the_leader_of_the_host(open_coordinator):
    coordinator = open_coordinator(5)
    ids = ["a", "b", "", "b", "a"]
    told = [coordinator.process(p, host_id=host_id) for p, host_id in enumerate(ids)]
    welcomes = [process.told() for process in told]
    assert {w["is"] for w in welcomes} == {"welcome"}
    assert {(w["heartbeat_s"], w["lost_after_s"]) for w in welcomes} == {(0.25, 1.0)}
    assert [w["leader"] for w in welcomes] == [0, 1, 2, 1, 0]
    assert [w.get("keeps") for w in welcomes] == [
        {"0": 100, "4": 104}, {"1": 101, "3": 103}, None, None, None,
    ]  # fmt: skip
    assert hosts_of(json.loads(welcomes[2]["body"])) == tuple(f"host{p}" for p in range(5))


def test_a_beat_is_answered_and_shown(open_coordinator):
    coordinator = open_coordinator(2)
    first, _ = coordinator.job()
    first.beat()
    first.beat(step=None, wait_s=0.075)
    member = coordinator.ask("members")["members"][0]
    assert member[2:4] == ["here", "step 3, joined, 0.0 s ago"]
    assert member[4:12] == [3, "", 0.0, False, 0.1, 7, 100, 0.075]


def test_losses_and_failures_are_pushed_to_all_survivors_but_departures_are_not(open_coordinator):
    coordinator = open_coordinator(4)
    first, second, third, fourth = coordinator.job()
    second.close()
    reason = "its connection closed (killed?)"
    for process in (first, third, fourth):
        assert process.told() == gone(1, "lost", reason, why="its connection closed")
    third.say("failed", b"Traceback\nValueError: no data")
    for process in (first, fourth):
        assert process.told() == gone(2, "failed", "Traceback\nValueError: no data")
    third.beat()  # it still runs, and the next that it hears is the answer
    fourth.say("bye")
    coordinator.until_states("here", "lost", "failed", "left")
    first.beat()  # the next that it hears is no farewell
    fourth.close()
    third.close()
    first.beat()
    coordinator.until_states("here", "lost", "failed", "left")


def test_pushes_are_limited_in_a_mass_loss_and_resume_once_survivors_meet(open_coordinator):
    coordinator = open_coordinator(70)
    first, second, *others = coordinator.job()
    for process in others[:-1]:
        process.close()
    coordinator.until_states("here", "here", *["lost"] * 67, "here")
    first.beat()
    assert len(first.passed_by) == 64
    first.passed_by.clear()
    second.close()
    coordinator.until_states("here", *["lost"] * 68, "here")
    lane = coordinator.lane(first)
    live = Point("live", (0, 1), survivors=True)
    lane.say("arrive", ticket=1, timeout_s=9, point=live)
    assert lane.told()["is"] == "live"
    others[-1].close()
    assert first.told()["process"] == 69


def test_silent_process_is_reported_to_waiting_processes_and_lost_much_later(open_coordinator):
    coordinator = open_coordinator(3)
    first, second, third = coordinator.job()
    lane = coordinator.lane(third)
    lane.say("arrive", ticket=1, step=4, timeout_s=None, point=Point("x", (1, 2)))
    coordinator.turn(1.0, beating=(first, third))
    silent = {"is": "silent", "process": 1, "body": "silent for 1 s; it may hold the interpreter"}
    for process in (first, third):
        told = process.told()
        assert {**told, "body": told["body"].removesuffix(" lock")} == silent
    assert coordinator.states() == ["here", "silent", "here"]
    assert first.told() == {"is": "locate", "process": 1, "pid": 101, "body": ""}  # one is asked
    second.beat()
    assert coordinator.states() == ["here", "here", "here"]
    coordinator.turn(1.0, beating=(third,))
    told = [third.told() for _ in range(4)]  # the lowest that lives
    asked = [("silent", 0), ("locate", 0), ("silent", 1), ("locate", 1)]
    assert [(frame["is"], frame["process"]) for frame in told] == asked
    third.say("seen", process=1, site="a.py:9 (f)", share=0.0, limit_s=None)
    coordinator.now += 1000.0  # it was stopped, or the laptop slept
    coordinator.turn()
    assert coordinator.states() == ["silent", "silent", "here"]
    coordinator.turn(2.5, beating=(first, third))
    silence = "silent for 4 s, in native code that holds the interpreter lock, called at a.py:9"
    assert second.told() == {"is": "lost", "body": silence}
    assert second.told() is None
    reason = f"{silence}; step 3, last at 'x' (a.py:1), 1004.0 s before"
    assert first.told() == gone(1, "lost", reason, why=silence)
    answer = lane.told()
    assert (answer["is"], answer["ticket"]) == ("lost", 1)
    assert json.loads(answer["body"]) == {"gone": [[1, [reason, "lost", "", silence, False]]]}


def test_pending_heartbeats_are_read_before_liveness_is_judged():
    now = [1000.0]
    server = socket.create_server(("127.0.0.1", 0))
    coordinator = Coordinator(server, 1, token=TOKEN, limits=LIMITS, clock=lambda: now[0])
    with ThreadPoolExecutor(1) as pool:  # it waits for a challenge
        joining = pool.submit(Process, coordinator.address, 0, 1)
        while coordinator.newest_job.meeting is None:
            coordinator._connections.poll(PATIENCE_S)
        process = joining.result()

    def half_a_second():  # two ticks: more is no time in which the coordinator ran
        now[0] += 0.5
        coordinator._on_time(now[0])
        return coordinator.newest_job.meeting.members(now[0])[0].state

    assert half_a_second() == "here"
    process.say("beat", **BEAT)
    inbox = coordinator.newest_job.mail.lives[0].connection.socket
    assert select.select([inbox], [], [], PATIENCE_S)[0]
    assert [half_a_second() for _ in range(3)] == ["here", "here", "silent"]
    coordinator._connections.close_all()
    process.close()


def test_host_agent_reports_stopped_and_exited_processes(open_coordinator):
    coordinator = open_coordinator(4)
    job = coordinator.job()
    host_agent = coordinator.host_agent(job[0])
    host_agent.say("states", stopped=[1], ended=[2])
    coordinator.turn_until("here", "stopped", "lost", "here", beating=(job[0], job[1], job[3]))
    told = coordinator.ask("members")["members"]
    assert told[1][3].startswith("stopped (SIGSTOP?) for ")
    host_agent.say("states", stopped=[], ended=[])
    coordinator.until_states("here", "here", "lost", "here")
    host_agent.say("states", stopped=[1], ended=[])
    reason = "its process ended without leaving the job"
    assert job[2].told() == {"is": "lost", "body": reason}
    assert job[0].told() == gone(2, "lost", reason)
    assert job[1].told() == gone(2, "lost", reason)
    coordinator.turn_until("here", "lost", "lost", "here", beating=(job[0], job[3]))
    assert job[1].told() == {"is": "lost", "body": "stopped (SIGSTOP?), silent for 1 s"}
    lost = job[0].told()
    silent = "stopped (SIGSTOP?), silent for 1 s"
    assert lost["body"].partition("; ")[0] == lost.pop("why", silent) == silent
    assert lost == gone(1, "lost", lost["body"])


def test_process_that_sends_bye_before_it_exits_is_not_lost(open_coordinator):
    coordinator = open_coordinator(2)
    first, second = coordinator.job()
    host_agent = coordinator.host_agent(first)
    host_agent.say("states", stopped=[], ended=[1])
    second.say("bye")
    second.close()
    coordinator.until_states("here", "left")
    coordinator.turn(1.0, beating=(first,))
    assert coordinator.states() == ["here", "left"]


def test_stopped_states_are_forgotten_when_the_host_agent_ends(open_coordinator):
    coordinator = open_coordinator(2)
    first, _ = coordinator.job()
    host_agent = coordinator.host_agent(first)
    host_agent.say("states", stopped=[1], ended=[])
    host_agent.say("states", stopped=[1], ended=[1, 5])  # breaks the protocol: it names others
    assert host_agent.told() is None
    coordinator.turn(1.0, beating=(first,))
    assert coordinator.states() == ["here", "silent"]


def test_newest_host_agent_of_a_host_replaces_the_earlier_one(open_coordinator):
    coordinator = open_coordinator(2)
    first, _ = coordinator.job()
    before = coordinator.host_agent(first)
    before.say("states", stopped=[1], ended=[])
    after = coordinator.host_agent(first)
    after.say("states", stopped=[], ended=[])
    assert before.told() is None
    coordinator.turn(1.0, beating=(first,))
    assert coordinator.states() == ["here", "silent"]


def test_killed_service_is_reported_to_all_and_ends_their_waits(open_coordinator):
    coordinator = open_coordinator(2)
    first, second = coordinator.job()
    service = coordinator.service()
    service.say("beat")
    assert service.told()["is"] == "beat"
    lane = coordinator.lane(first)
    lane.say("arrive", ticket=5, timeout_s=9, point=Point("x"))
    assert coordinator.ask("members")["services"] == [["JAX's service", "far", "here", "serves"]]
    service.close()
    reason = "its connection closed (killed?)"
    for process in (first, second):
        assert process.told() == gone(None, "lost", reason, name="JAX's service")
    answer = lane.told()
    assert (answer["is"], answer["ticket"]) == ("lost", 5)
    assert json.loads(answer["body"]) == {"gone": [], "services": [["JAX's service", reason]]}
    assert coordinator.ask("members")["services"] == [["JAX's service", "far", "lost", reason]]


def test_a_service_that_is_silent_is_lost_and_one_that_leaves_is_not(open_coordinator):
    coordinator = open_coordinator(1)
    [process] = coordinator.job()
    silent, leaving = coordinator.service("silent"), coordinator.service("leaving")
    leaving.say("bye")
    leaving.close()
    coordinator.turn(1.0, beating=(process,))
    assert process.told() == gone(None, "lost", "silent for 1 s", name="silent")
    assert silent.told() is None
    assert [row[0] for row in coordinator.ask("members")["services"]] == ["silent"]


def test_a_job_that_joins_is_refused_when_its_service_is_gone(open_coordinator):
    coordinator = open_coordinator(2)
    service, first = coordinator.service(), coordinator.process(0)
    coordinator.until_states("here", "absent")
    service.close()
    told = first.told()
    refusal = refusal_of_row(told["refusal"])
    assert (told["is"], refusal.reason, refusal.missing) == ("refused", "abandoned", (1,))
    assert refusal.who == "JAX's service is lost (its connection closed (killed?))"
    assert first.told() is None


def test_observer_sees_which_processes_joined_and_can_disconnect_freely(open_coordinator):
    coordinator = open_coordinator(2)
    assert coordinator.states() == ["absent", "absent"]
    assert coordinator.ask("stacks", processes=None) == {"stacks": {}}
    coordinator.process(1)
    coordinator.until_states("absent", "here")
    rows = coordinator.ask("members")["members"]
    assert rows[1][:4] == [1, "host1", "here", "waits for all to join"]
    assert rows[0][:4] == [0, "", "absent", "has not joined yet"]
    other = coordinator.stranger("observe", token=TOKEN)
    assert other.told()["is"] == "welcome"
    other.close()
    assert coordinator.states() == ["absent", "here"]


@pytest.mark.parametrize("asks", ["observer", "lane"])
def test_stacks_are_requested_from_processes_and_returned_to_the_requester(open_coordinator, asks):
    coordinator = open_coordinator(3)
    job = coordinator.job()
    asker = coordinator.observer if asks == "observer" else coordinator.lane(job[2])
    asker.say("stacks", ticket=70, processes=[1, 0, 1])
    for process in job[:2]:
        told = process.told()
        assert told["is"] == "stacks"
        process.say("stacks", f"in {process.process}".encode(), ticket=told["ticket"], **BEAT)
    told = asker.told()
    assert (told["ticket"], told["is"]) == (70, "stacks")
    assert json.loads(told["body"]) == {"stacks": {"0": "in 0", "1": "in 1"}}
    assert coordinator.ask("members")["members"][1][4] == BEAT["step"]


def test_deadline_answer_has_the_stacks_of_late_processes(open_coordinator):
    coordinator = open_coordinator(2)
    first, second = coordinator.job()
    lane = coordinator.lane(first)
    lane.say("arrive", ticket=1, timeout_s=0.5, point=Point("x"))
    while "waits at" not in coordinator.ask("members")["members"][0][3]:
        continue
    coordinator.turn(0.5)
    told = second.told()
    assert told["is"] == "stacks"
    second.say("stacks", b"in load", ticket=told["ticket"], **BEAT)
    answer = lane.told()
    assert (answer["is"], answer["ticket"]) == ("deadline", 1)
    facts = json.loads(answer["body"])
    assert facts["stacks"] == [[1, "in load"]]
    assert facts["words"][0][1].startswith("step 3, ")


def test_launcher_gets_joins_and_departures_in_order(open_coordinator):
    coordinator = open_coordinator(4)
    script = coordinator.stranger("joined", token=TOKEN, process=2)  # it joins JAX's job only
    assert (script.told()["is"], script.told()) == ("welcome", None)
    assert coordinator.news == [{"joined": 2, "by_jax": True}]
    coordinator.news.clear()
    first, second, third, _ = coordinator.job()
    host_agent = coordinator.host_agent(first, pid=77)
    host_agent.say("states", stopped=[3], ended=[])
    coordinator.until_states("here", "here", "here", "stopped")
    assert sorted(news["joined"] for news in coordinator.news[:-1]) == [0, 1, 2, 3]
    kept = {"keeper": "host", "pid": 77, "host": "host0", "processes": [0, 1, 2, 3]}
    assert coordinator.news.pop() == kept
    coordinator.news.clear()
    third.say("failed", b"ValueError: no data")
    coordinator.until_states("here", "here", "failed", "stopped")
    second.say("bye", step=7)
    coordinator.until_states("here", "left", "failed", "stopped")
    at_s = coordinator.now
    coordinator.turn_until("here", "left", "failed", "lost", beating=[first])
    lost_at_s = coordinator.now
    host_agent.close()
    while len(coordinator.news) < 5:
        coordinator.turn()
    first.close()
    coordinator.until_states("lost", "left", "failed", "lost")
    failed, left, dismissed, lost, keeper_gone, last = coordinator.news
    assert left["at"]["step"] == 7  # newer than its last beat
    assert (
        set(failed.pop("at"))
        == set(left.pop("at"))
        == {"step", "call", "name", "site", "age_s", "waits", "met"}
    )
    assert not failed.pop("programs")
    assert failed == {"gone": 2, "state": "failed", "words": "ValueError: no data", "at_s": at_s}
    assert left == {"gone": 1, "state": "left", "words": "left the job", "at_s": at_s}
    assert dismissed == {"dismissed": 3}
    assert (lost["gone"], lost["state"], lost["at_s"]) == (3, "lost", lost_at_s)
    assert keeper_gone == {"keeper_gone": "host", "at_s": lost_at_s}
    assert (last["gone"], last["state"], last["words"]) == (
        0,
        "lost",
        "its connection closed (killed?)",
    )


def test_host_agents_of_a_finished_job_are_not_reported_to_the_launcher(open_coordinator):
    coordinator = open_coordinator(2)
    job = coordinator.job()
    host_agent = coordinator.host_agent(job[0], pid=77)
    host_agent.say("states", stopped=[1], ended=[])
    coordinator.until_states("here", "stopped")
    for process in job:
        process.say("bye")
        process.close()
    assert host_agent.told() is None
    assert not [news for news in coordinator.news if "keeper_gone" in news]


def test_launcher_gets_the_loss_of_a_service(open_coordinator):
    coordinator = open_coordinator(2)
    coordinator.service().close()
    while not coordinator.news:
        coordinator.turn()
    (news,) = coordinator.news
    assert (news["service"], bool(news["words"])) == ("JAX's service", True)


def test_one_warning_counts_the_programs_that_a_process_alone_has_compiled(open_coordinator):
    coordinator = open_coordinator(2)
    first, second = coordinator.job()
    rows = [[name, f"jit({name})", "f32[8]", 2, "eval.py:31 (main)", 0] for name in ("f", "g")]
    first.say("beat", **BEAT, programs=[[None, 0, 2, rows]])
    first.say("beat", **BEAT, programs=[[None, 2, 2, []]])
    second.say("beat", **BEAT, programs=[[None, 1, 0, []]])
    assert coordinator.ask("members")["programs"] == [[], 0]  # it may only be behind
    second.say("beat", **BEAT, programs=[[None, 2, 0, []]])
    told = next(frame for frame in iter(first.told, None) if frame["is"] != "beat")
    assert told["is"] == "programs"
    assert program_warning(differences_of(told["programs"])) == (
        "process 0 alone has compiled jit(f) for 2 devices of processes 0-1 at eval.py:31; if it "
        "runs it, it may wait for the others (1 more difference: shoal.job_status())"
    )
    programs = coordinator.ask("members")["programs"]
    assert [len(programs[0]), programs[1]] == [2, 0]
    second.close()
    told = next(frame for frame in iter(first.told, None) if frame["is"] == "gone")
    assert told["programs"] == programs


@pytest.mark.parametrize("how", ["exited", "raised"])
def test_a_process_that_has_called_exit_is_not_named_to_report(open_coordinator, how):
    coordinator = open_coordinator(2)
    first, second = coordinator.job()
    first.say("failed", b"exited with code 72", how=how)
    coordinator.until_states("failed", "here")
    lane = coordinator.lane(second)
    lane.say("report", sharing=[0, 1], waits=True, ticket=7)
    if how == "raised":  # the first is asked whether it is there
        assert first.told()["is"] == "reporter"
        return
    answer = lane.receive()
    assert answer.header["ticket"] == 7
    assert json.loads(answer.body)["reports"] is True
