"""Check for a web proxy between JAX's client and its service.

gRPC, by which JAX's client connects, uses the proxy of the first of three variables that is set,
even for the loopback, unless the first of three others names the host ("*" names none).
`shoal.initialize` bypasses it; a program that calls only `jax.distributed.initialize` does not.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping

from shoal.runtime.doctor.findings import CheckResult, Finding

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_SPARING = ("no_grpc_proxy", "no_proxy", "NO_PROXY")


def check_proxies(host: str, addresses: Iterable[str], env: Mapping[str, str]) -> CheckResult:
    """Check the proxy variables for JAX's service on `host`; an empty host: only list them.

    >>> env = {"http_proxy": "http://proxy:3128", "no_proxy": "localhost,.cluster"}
    >>> [len(check_proxies(host, [], env).findings) for host in ("node.cluster", "node")]
    [0, 1]
    """
    shown = {name: _without_password(env[name]) for name in _PROXIES if env.get(name)}
    spared_by = next((name for name in _SPARING if env.get(name)), None)
    facts = shown | ({spared_by: env[spared_by]} if spared_by else {})
    if not shown or not host:
        return CheckResult(facts)
    entries = env[spared_by].split(",") if spared_by else []
    if any(_spares(entry.strip(), host, addresses) for entry in entries):
        return CheckResult(facts)
    name, value = next(iter(shown.items()))
    finding = Finding(
        "proxy",
        f"{name}={value} is in the way: JAX's client would connect to {host} through that proxy",
        f"add {host} to {spared_by or 'no_proxy'} (shoal.initialize bypasses the proxy; "
        "jax.distributed.initialize does not)",
    )
    return CheckResult(facts, (finding,))


def _spares(entry: str, host: str, addresses: Iterable[str]) -> bool:
    """Return whether an entry of no_proxy names the host."""
    if not entry:
        return False
    try:
        network = ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return host.lower().endswith(entry.lower())
    return any(ipaddress.ip_address(one.partition("%")[0]) in network for one in addresses)


def _without_password(url: str) -> str:
    """Return a proxy without all that precedes its host; a password may hold any character.

    >>> [_without_password(f"{start}user:sec/ret@proxy:3128") for start in ("", "http://")]
    ['…@proxy:3128', 'http://…@proxy:3128']
    """
    start, at, rest = url.rpartition("@")
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", start)
    return f"{scheme[0] if scheme else ''}{'…@' if at else ''}{rest}"
