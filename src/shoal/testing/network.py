"""A network of local namespaces that tests can partition: each process seems to be a separate host.

    netns of process 0 ──veth──┐
    netns of process 1 ──veth──┼── bridge, in a namespace of its own
    netns of services  ──veth──┘

Nothing is visible outside: the namespaces belong to one process (the warden), and the kernel
removes them and their links when it and the processes inside have ended. A cut detaches a port from
the bridge: packets vanish silently, as with a cable pulled behind a switch; neither side loses its
carrier. The host name in each namespace is its address, because gloo binds to whatever the host
name resolves to. Linux, as root, with `pyroute2` (`pip install shoal[test]`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import socket
import subprocess
import sys
from typing import Any

from shoal.runtime.system.child_process import own_environment
from shoal.testing.enter import enter

__all__ = ["address_of", "serve_network", "why_no_cuts"]

_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000
_TRY_S = 30.0


def address_of(place: int) -> str:
    """Return the address of a namespace; it exists only inside the network."""
    return f"10.201.{place // 250}.{place % 250 + 1}"


@functools.cache
def why_no_cuts() -> str:
    """Return why tests cannot cut processes off here; empty if they can. Tried once."""
    if sys.platform != "linux":
        return "network namespaces exist only on Linux"
    if importlib.util.find_spec("pyroute2") is None:
        return "pyroute2 is not installed (pip install shoal[test])"
    if os.geteuid() != 0:
        return "network namespaces need root"
    command = [sys.executable, "-P", "-m", "shoal.testing.warden", "none", "--network", "1"]
    try:
        done = subprocess.run(
            command,
            env=own_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TRY_S,
        )
    except subprocess.TimeoutExpired:
        return f"the warden of the network did not start within {_TRY_S:g} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]


def serve_network(places: int) -> None:
    """Create the network, report where it is, and obey `cut I` and `mend I` until stdin closes."""
    from pyroute2 import IPRoute

    _unshare(_CLONE_NEWNET)
    hub_fd = os.open("/proc/self/ns/net", os.O_RDONLY)
    with IPRoute() as hub:
        hub.link("add", ifname="hub", kind="bridge")
        bridge = hub.link_lookup(ifname="hub")[0]
        hub.link("set", index=bridge, state="up")
        ports, namespaces = [], []
        for place in range(places):
            pair = _namespace(address_of(place))
            enter(hub_fd)
            ports.append(_join(hub, bridge, place, pair[0]))
            _address(IPRoute, hub_fd, pair[0], address_of(place))
            namespaces.append([f"/proc/{os.getpid()}/fd/{fd}" for fd in pair])
        print(json.dumps(namespaces), flush=True)
        for line in sys.stdin:
            order, place_text = line.split()
            master = bridge if order == "mend" else 0
            hub.link("set", index=ports[int(place_text)], master=master)
            print("done", flush=True)


def _namespace(name: str) -> tuple[int, int]:
    """Return handles of a new network namespace and of one with host name `name`.

    This process stays in both.
    """
    _unshare(_CLONE_NEWNET | _CLONE_NEWUTS)
    socket.sethostname(name)
    net, uts = (os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts"))
    return net, uts


def _join(hub: Any, bridge: int, place: int, net_fd: int) -> int:
    """Connect a namespace to the hub by a veth pair; return the index of the hub's end."""
    peer = {"ifname": "eth0", "net_ns_fd": net_fd}
    hub.link("add", ifname=f"port{place}", kind="veth", peer=peer)
    port: int = hub.link_lookup(ifname=f"port{place}")[0]
    hub.link("set", index=port, master=bridge, state="up")
    return port


def _address(route: Any, hub_fd: int, net_fd: int, address: str) -> None:
    """Give the namespace's end its address, and bring its links up."""
    enter(net_fd)
    with route() as inside:
        for name in ("lo", "eth0"):
            inside.link("set", index=inside.link_lookup(ifname=name)[0], state="up")
        eth = inside.link_lookup(ifname="eth0")[0]
        inside.addr("add", index=eth, address=address, prefixlen=16)
    enter(hub_fd)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.unshare exists only since Python 3.12
    if libc.unshare(flags) != 0:
        error_number = ctypes.get_errno()
        raise PermissionError(error_number, f"unshare: {os.strerror(error_number)}")
