"""Node 0 uses four ports in a row; one that is taken is named before anything starts."""

from __future__ import annotations

import socket

import pytest

from quiet_ports import quiet_row
from shoal.errors import InitializeError
from shoal.launch.nodes.joining import open_ports, strange_address
from shoal.launch.order import NUM_PORTS


@pytest.fixture
def row():
    """Return a loopback address and the first of four free ports there."""
    return quiet_row(NUM_PORTS)


def test_the_first_is_open_and_the_others_are_left_free(row):
    host, first = row
    server = open_ports(host, first)
    with server, socket.create_connection((host, first)):
        for port in range(first + 1, first + NUM_PORTS):
            socket.create_server((host, port)).close()


@pytest.mark.parametrize("taken", range(NUM_PORTS))
def test_a_taken_one_is_named(row, taken):
    host, first = row
    with socket.create_server((host, first + taken)), pytest.raises(InitializeError) as caught:
        open_ports(host, first)
    assert f"cannot listen at {host}:{first + taken}: Address already in use" in str(caught.value)
    assert f"node 0 uses the ports {first} to {first + 3}" in str(caught.value)
    open_ports(host, first).close()


def test_an_address_of_another_host_is_noted():
    assert strange_address("127.0.0.1") == strange_address("localhost") == ""
    words = strange_address("192.0.2.1")  # for documentation: RFC 5737
    assert words.startswith("192.0.2.1 is not an address of this host: is --node-rank 0 meant")
    assert "'no.such.invalid' does not resolve on this host" in strange_address("no.such.invalid")
