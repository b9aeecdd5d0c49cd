"""Sockets of every kind: links that die, addresses to listen at, Unix sockets of this host."""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from shoal.runtime.wire.frames import address_text, split_address
from shoal.runtime.wire.socket_calls import LinkError, socket_call

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


# ---- The address at which a server listens, given the name by which others reach its host.


LOOPBACK_ADVICE = (
    "processes of one host, and JAX with its service, talk by it: `ip link set lo up` in this "
    "network namespace"
)


def is_loopback(host: str) -> bool:
    """Return whether this is a name or an address of the loopback.

    >>> [is_loopback(host) for host in ("LocalHost.", "127.0.0.1", "0:0:0:0:0:0:0:1", "10.0.0.1")]
    [True, True, True, False]
    """
    name = host.lower().removesuffix(".")
    return name in ("localhost", "::1", "0:0:0:0:0:0:0:1") or name.startswith(
        ("127.", "::ffff:127.")
    )


def short_folder() -> str:
    """Return a directory of this host that all its processes know, for Unix sockets and secrets.

    Not TMPDIR, which may differ between processes, and be too long: a socket's path has at most 107
    bytes.
    """
    folders = ("/tmp", "/dev/shm")
    return next((folder for folder in folders if os.access(folder, os.W_OK | os.X_OK)), folders[0])


def bind_host(host: str) -> str:
    """Return the address to listen at, for processes that reach this host by the name `host`."""
    if is_loopback(host):
        is_number = host[0].isdigit() or ":" in host
        return host if is_number else "127.0.0.1"
    return "::" if ":" in host else "0.0.0.0"


def why_no_loopback() -> str:
    """Return the words about a loopback that is down, as in a new network namespace; "" if up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # sends nothing
        except OSError as error:
            if error.errno == errno.ENETUNREACH:
                return "the loopback interface of this host (lo) is down"
    return ""


def moved(address: str, host: str) -> str:
    """Return the address, with the host by which other processes reach it."""
    return address_text(host, split_address(address)[1])


# ---- Unix-socket fast path for clients on the server's host.
#
# A barrier over loopback TCP takes about a tenth to a quarter longer (`benchmarks/control.py`,
# row `barrier sockets`). The socket's name is in Linux's abstract namespace (unix(7)): no file is
# left behind, only one network namespace sees it, and the name is random; clients must prove all
# the same that they have the token. It carries calls only. Connections that determine liveness
# stay on TCP, where the kernel watches the link.


_BACKLOG = 4096
_CREDENTIALS = struct.Struct("iII")  # pid, user, group


def listen_unix(name: str = "") -> socket.socket | None:
    """Return a socket that listens at this name, or at a random one; None where the platform has no
    abstract names.

    Raises:
      OSError: another socket on this host has the name.
    """
    if sys.platform != "linux":
        return None
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(f"\0{name or f'shoal-{os.urandom(16).hex()}'}")
    except OSError:
        server.close()
        raise
    server.listen(_BACKLOG)
    return server


def connect_unix(name: str) -> socket.socket:
    """Connect to the socket of this name, given without its leading zero byte.

    A name, unlike a port, may be anybody's: another user's process is not spoken to.

    Raises:
      LinkError: no socket on this host has it, its backlog is full, or it is another user's (not
        root's).
    """
    if sys.platform != "linux":
        raise LinkError("no abstract socket names on this platform")
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        socket_call(sock.connect, f"\0{name}")
        if _owner(sock) not in (0, os.geteuid()):
            raise LinkError(f"the socket {name} is another user's")
    except BaseException:
        sock.close()
        raise
    return sock


def may_call(sock: socket.socket, *, root_serves_all: bool = True) -> bool:
    """Return whether an accepted connection of this host is of this user or of root.

    Over TCP, only Linux shows whose a connection is; elsewhere all may call.

    Args:
      root_serves_all: whether a server of root's accepts all users.
    """
    if root_serves_all and os.geteuid() == 0:
        return True
    owners = {_owner(sock)} if sock.family == socket.AF_UNIX else _tcp_owners(sock)
    return owners is None or (bool(owners) and owners <= {0, os.geteuid()})


_ESTABLISHED = "01"  # in /proc/net/tcp


def _tcp_owners(sock: socket.socket) -> set[int] | None:
    """Return the user id of the socket at the other end of a TCP connection of this host.

    None: this system does not show it. Empty: the socket is gone, or the table cannot be read.
    """
    try:
        wanted = _row_ends(sock.getpeername(), sock.getsockname())
        owners = set()
        for path in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(path, encoding="ascii") as table:
                rows = [line.split() for line in table][1:]
            for _, local, remote, state, _, _, _, owner, _, inode, *_ in rows:
                # What is closed is shown as root's, and without a file.
                if state == _ESTABLISHED and inode != "0" and (local, remote) in wanted:
                    owners.add(int(owner))
    except FileNotFoundError:
        return None if not os.path.exists("/proc/net/tcp") else owners
    except (OSError, ValueError):
        return set()
    return owners


def _row_ends(local: Sequence[Any], remote: Sequence[Any]) -> set[tuple[str, str]]:
    """Return two addresses as /proc/net/tcp and tcp6 write them: IPv4's may stand in both."""
    own, other = _packed(str(local[0])), _packed(str(remote[0]))
    forms = [b"", _MAPPED] if len(own) == 4 else [b""]
    return {
        (f"{_in_words(form + own)}:{local[1]:04X}", f"{_in_words(form + other)}:{remote[1]:04X}")
        for form in forms
    }


_MAPPED = b"\0" * 10 + b"\xff\xff"  # before an IPv4 address among IPv6's


def _packed(host: str) -> bytes:
    """Return the bytes of an address; of IPv4 if it is one of its."""
    if ":" not in host:
        return socket.inet_pton(socket.AF_INET, host)
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0]).removeprefix(_MAPPED)


def _in_words(packed: bytes) -> str:
    """Return bytes in hexadecimal, word by word in this machine's order."""
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))


def peer_pid(sock: socket.socket) -> int:
    """Return the process at the other end, which listened or connected; 0: in another namespace."""
    return _credentials(sock)[0]


def _owner(sock: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    return _credentials(sock)[1]


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return pid, user and group of the process at the other end: unix(7), SO_PEERCRED."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(packed)
    return pid, user, group
