"""What agreeing costs on the wire: as much for each of fifty processes as for each of two."""

import math
import threading

import numpy as np
import pytest

from runtime.coordinator_contract import run_together
from shoal.collectives.same import assert_same
from shoal.errors import DivergenceError
from shoal.runtime.agreement import Call, agree
from shoal.runtime.wire.connection import Channel

FOR_EVER = math.inf  # so much is left of it after any time: the words of a call do not change


@pytest.fixture
def traffic(monkeypatch):
    """Return what each thread has sent and received on connections to the coordinator."""
    counted = threading.local()
    send, receive = Channel._send_some, Channel._receive_some

    def count_sent(self, data):
        sent = send(self, data)
        counted.sent = getattr(counted, "sent", 0) + sent
        return sent

    def count_received(self, limit):
        data = receive(self, limit)
        counted.received = getattr(counted, "received", 0) + len(data)
        return data

    monkeypatch.setattr(Channel, "_send_some", count_sent)
    monkeypatch.setattr(Channel, "_receive_some", count_received)
    return counted


def costs(coordinators, traffic, processes, call):
    """Return the different (sent, received) of the processes of a job for one `call`."""
    clients = coordinators.join_all(processes)

    def measured(client):
        call(client)  # the first one also opens the connection
        before = traffic.sent, traffic.received
        call(client)
        return traffic.sent - before[0], traffic.received - before[1]

    try:
        return set(run_together(*(lambda c=c: measured(c) for c in clients)))
    finally:
        for client in clients:
            client.close()


def agree_on_much(client):
    call = Call("broadcast", None, "a.py:1 (f)", tuple(f"['{n}']: float32[8]" for n in range(999)))
    agree(client, call, b"the same digest", timeout_s=FOR_EVER)


def compare_much(client):
    assert_same.on(client, [np.ones(1 << 20), "x" * 5000], name="w", timeout_s=FOR_EVER)


@pytest.mark.parametrize("call", [agree_on_much, compare_much])
def test_a_process_sends_and_receives_the_same_in_a_large_job(coordinators, traffic, call):
    few, many = (costs(coordinators, traffic, processes, call) for processes in (2, 50))
    assert few == many
    ((sent, received),) = few
    assert 200 < sent < 1000
    assert 30 < received < 200


def test_a_difference_costs_little_however_large_the_values(coordinators, traffic):
    def differ(client):
        values = np.zeros(1 << 20)
        values[(1 << 19) + client.process % 2] = 1
        with pytest.raises(DivergenceError, match=r"\[524288\] = 1\.0"):
            assert_same.on(client, values, name="w", timeout_s=FOR_EVER)

    for sent, received in costs(coordinators, traffic, 4, differ):
        assert sent < 10_000
        assert received < 10_000
