"""The address at which a server listens, given the name by which others reach its host."""

from __future__ import annotations

import errno
import socket

from shoal.runtime.wire.frames import address_text, split_address

LOOPBACK_ADVICE = (
    "processes of one host, and JAX with its service, talk by it: `ip link set lo up` in this "
    "network namespace"
)


def is_loopback(host: str) -> bool:
    """Return whether this is a name or an address of the loopback."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def bind_host(host: str) -> str:
    """Return the address to listen at, for processes that reach this host by the name `host`."""
    if is_loopback(host):
        return host if host[0].isdigit() or ":" in host else "127.0.0.1"
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
