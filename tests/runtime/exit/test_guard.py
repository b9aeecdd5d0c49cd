"""What a process says at its end of an error of JAX's runtime, and with which code it ends."""

from __future__ import annotations

from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.exit.causes import explain, report_cut
from shoal.runtime.rules.point import Departure, Member

ENDED = Member(1, "h", "failed", "it hung after JAX's service was lost, and was ended")


def test_lost_service_is_named_before_the_processes_it_ended():
    client = LocalJob(2).clients[0]
    client.peer_losses.receive(None, "JAX's service", Departure("silent for 2 s", "lost"))
    code, (first, second) = explain(client, {1: ENDED})
    assert code == 71
    assert first == "JAX's service is lost: silent for 2 s"
    assert second.startswith("process 1 of 2 (h) is gone: it hung")


def test_a_failed_peer_alone_is_a_failed_peer():
    code, (line,) = explain(LocalJob(2).clients[0], {1: ENDED})
    assert code == 72
    assert line.startswith("process 1 of 2 (h) is gone: it hung")


def test_an_end_without_teardown_names_the_process_behind_it(capsys):
    assert report_cut(LocalJob(2).clients[0], {1: ENDED}) == 72
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("without JAX's teardown, which would wait for a process that is gone")
    assert second.startswith("shoal: process 1 of 2 (h) is gone: it hung")
