"""Check that a name resolves, an address answers, a port can be bound; who listens at a port."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

from shoal.runtime.wire.frames import split_address

OPEN, REFUSED, UNREACHABLE = "open", "refused", "unreachable"
_AGAIN_S = 0.25


class ResolvedName(NamedTuple):
    """The addresses of a name; none, and the error, if it does not resolve."""

    addresses: tuple[str, ...]
    error: str = ""


class ConnectAttempt(NamedTuple):
    """How an attempt to connect ended: open, refused (the host answers) or unreachable."""

    outcome: str
    words: str
    took_s: float


def resolve(host: str, timeout_s: float, *, retry_s: float = 0.0) -> ResolvedName:
    """Resolve a name. The resolver has no deadline of its own, so a thread waits for it.

    Args:
      timeout_s: time limit, seconds.
      retry_s: how long to try again if the name is not known: names of pods appear late.

    >>> resolve("127.0.0.1", 5).addresses
    ('127.0.0.1',)
    """
    answers: list[ResolvedName] = []

    def run() -> None:
        until = time.monotonic() + retry_s
        while not (answer := _resolve(host)).addresses and time.monotonic() < until:
            time.sleep(_AGAIN_S)
        answers.append(answer)

    thread = threading.Thread(target=run, name="shoal resolves a name", daemon=True)
    thread.start()
    thread.join(timeout_s)
    late = ResolvedName((), f"the resolver did not answer within {timeout_s:g} s")
    return answers[0] if answers else late


def _resolve(host: str) -> ResolvedName:
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        return ResolvedName((), reason or str(error))
    return ResolvedName(tuple(dict.fromkeys(str(row[4][0]) for row in rows)))


def connect_to(address: str, timeout_s: float) -> ConnectAttempt:
    """Try once to connect to `address`, host:port, and close the connection."""
    began = time.monotonic()
    try:
        socket.create_connection(split_address(address), timeout_s).close()
    except ConnectionRefusedError as error:
        outcome, reason = REFUSED, error.strerror or str(error)
    except TimeoutError:
        outcome, reason = UNREACHABLE, f"no answer within {timeout_s:g} s"
    except OSError as error:
        outcome, reason = UNREACHABLE, error.strerror or str(error)
    else:
        outcome, reason = OPEN, ""
    return ConnectAttempt(outcome, reason, time.monotonic() - began)


def bind_error(host: str, port: int) -> int:
    """Return the error number of binding as a server does, 0 if it can be bound."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        return error.errno or errno.EIO
    return 0


# ---- Find the process of this host that listens at a port, as Linux shows it.


_LISTEN = "0A"
_MOST_WORDS = 60


def port_owner(port: int) -> str:
    """Return `pid 7 (python train.py)`; "" if no process is found that this user may see."""
    sockets = {f"socket:[{inode}]" for inode in _listening(port)}
    for link in glob.iglob("/proc/[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if os.readlink(link) in sockets:
                pid = int(link.split("/")[2])
                return f"pid {pid} ({_command(pid)})"
    return ""


def _listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen at a port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    return inodes


def _command(pid: int) -> str:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    arguments[0] = os.path.basename(arguments[0])
    text = " ".join(word.decode(errors="replace") for word in arguments if word)
    text = re.sub(r"\s+", " ", text) or "?"
    return text if len(text) <= _MOST_WORDS else text[: _MOST_WORDS - 1] + "…"
