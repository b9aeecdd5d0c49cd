"""What the kernel is told about a link; that it tells us is shown where a link is really cut."""

import errno
import math
import socket

import pytest

from shoal.runtime.wire.sockets import is_cut_off, watch_link


@pytest.fixture
def sock():
    with socket.socket() as sock:
        yield sock


@pytest.mark.parametrize("lost_after_s", [0.2, 1.0, 2.0, 10.0, 1e9])
def test_keepalive_probes_and_user_timeout_are_set(sock, lost_after_s):
    watch_link(sock, lost_after_s)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    limit_ms = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == min(lost_after_s * 1e3, 2**31 - 1)
    idle, every, probes = (
        sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle == every >= 1
    assert probes >= 1
    if 2 <= lost_after_s < 1e6:
        assert idle + every * probes <= lost_after_s


def test_infinity_leaves_the_socket_alone(sock):
    watch_link(sock, math.inf)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


def test_a_connection_within_a_host_has_no_link():
    """A HELLO over the Unix socket, which is for calls, does not end the coordinator."""
    with socket.socket(socket.AF_UNIX) as sock:
        watch_link(sock, 1.0)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


def test_cut_link_is_distinguished_from_a_closed_connection():
    assert is_cut_off(OSError(errno.ETIMEDOUT, "timed out"))
    assert is_cut_off(OSError(errno.EHOSTUNREACH, "no route"))
    assert not is_cut_off(ConnectionResetError(errno.ECONNRESET, "reset"))
    assert not is_cut_off(BrokenPipeError())
