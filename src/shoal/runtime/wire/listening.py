"""The address at which a server listens, given the name by which others reach its host."""

from __future__ import annotations

from shoal.runtime.wire.frames import address_text, split_address


def is_loopback(host: str) -> bool:
    """Return whether this is a name or an address of the loopback."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def bind_host(host: str) -> str:
    """Return the address to listen at, for processes that reach this host by the name `host`."""
    if is_loopback(host):
        return host if host[0].isdigit() or ":" in host else "127.0.0.1"
    return "::" if ":" in host else "0.0.0.0"


def moved(address: str, host: str) -> str:
    """Return the address, with the host by which other processes reach it."""
    return address_text(host, split_address(address)[1])
