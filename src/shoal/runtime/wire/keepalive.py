"""Detect dead TCP links with kernel keepalive."""

from __future__ import annotations

import errno
import math
import socket

_CUT_OFF = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
)
_PROBES = 5
_LONGEST_S = 30_000  # the kernel's interval between probes has 16 bits, in seconds


def watch_link(sock: socket.socket, lost_after_s: float) -> None:
    """Let reads of `sock` fail once its peer was unreachable for about `lost_after_s`.

    The kernel of a stopped process still answers: this detects pulled cables and hosts that are
    off. Does as much as the platform supports; `inf` disables it. Within a host there is no link.
    """
    if lost_after_s == math.inf or sock.family == socket.AF_UNIX:
        return
    every_s = min(max(1, round(lost_after_s / _PROBES)), _LONGEST_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", every_s),
        ("TCP_KEEPALIVE", every_s),  # its name on macOS
        ("TCP_KEEPINTVL", every_s),
        ("TCP_KEEPCNT", max(1, min(math.ceil(lost_after_s / every_s) - 1, _PROBES))),
        ("TCP_USER_TIMEOUT", min(math.ceil(lost_after_s * 1e3), 2**31 - 1)),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def is_cut_off(error: OSError) -> bool:
    """Return whether a socket's error means that the peer is unreachable, not that it closed."""
    return error.errno in _CUT_OFF
