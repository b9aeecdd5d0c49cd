"""Link speeds of a topology: published figures, and the caller's.

An unpublished figure is None, not a guess, and a cost that needs it is an error until the caller
supplies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.arguments import as_number
from shoal.colour import local
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.hardware.hosts import Hosts
from shoal.plan.hardware.tpu_generations import GENERATIONS
from shoal.plan.hardware.wiring import Slices, Topology, Torus, check_topology

__all__ = ["Link", "Links", "links_of"]


class Link(NamedTuple):
    """A kind of link, with its speed."""

    name: str
    bytes_per_s: float  # in one direction
    latency_s: float  # of one hop, or of one step across a switch
    source: str


class Links(NamedTuple):
    """The links of a topology; None where the figure is unknown."""

    near: Link | None  # torus: each link; host: each device's own port
    network: Link | None  # per host, shared by its devices


# Data center network of a chip, in bytes per second: the table "DCN bandwidth per chip" of
# https://docs.cloud.google.com/tpu/docs/tpu7x for v5p, v6e and TPU7x; for v5e the NICs of a host of
# 8 chips, 2 x 100 Gbit/s, of https://docs.cloud.google.com/tpu/docs/v6e. No figure is given for
# others.
_DCN = {"v5e": 3.125e9, "v5p": 6.25e9, "v6e": 12.5e9, "tpu7x": 12.5e9}

# NVIDIA DGX H100: NVLink 4, 900 GB/s a GPU in both directions together; a ConnectX-7 of 400 Gbit/s
# for each GPU (DGX H100/H200 User Guide, "Hardware Overview").
_NVLINK, _NIC = 450e9, 50e9
# A step of a ring, protocol Simple, over NVLink and over a network: `hwLat` in
# https://github.com/NVIDIA/nccl/blob/v2.19/src/graph/tuning.cc. No figure is published for other
# networks, so the same one is used.
_NVLINK_S, _NETWORK_S = 3.4e-6, 14e-6
_GIVEN = "as given"


@local
def links_of(
    topology: Topology,
    *,
    link_bytes_per_s: float | None = None,
    network_bytes_per_s: float | None = None,
) -> Links:
    """Return the links of a topology, by published figures unless given.

    Local.

    Args:
      topology: for a TPU generation, the figures are that generation's; for GPU hosts, those of a
        DGX H100; for others none are known.
      link_bytes_per_s: of one link of a torus in one direction; elsewhere, of one device's port
        within its host.
      network_bytes_per_s: of one host, in one direction.

    Raises:
      UsageError: a figure is not above 0.

    Example:
      >>> from shoal.planning import topology
      >>> links_of(topology.parse("v5p:4x4x4 x 2 slices")).network.bytes_per_s  # 4 of 50 Gbit/s
      25000000000.0
      >>> links_of(topology.parse("flat:8")).near is None
      True
    """
    given = {"link_bytes_per_s": link_bytes_per_s, "network_bytes_per_s": network_bytes_per_s}
    check_topology("links_of", topology)
    for name, figure in given.items():
        if figure is None:
            continue
        value = as_number(figure)
        if value is None:
            raise UsageTypeError(f"links_of: {name}={figure!r} must be bytes per second")
        if not 0 < value < float("inf"):
            raise UsageError(f"links_of: {name}={figure!r} must be above 0, and finite")
    if isinstance(topology, Torus):
        near, network = _of_tori(topology, [topology])
    elif isinstance(topology, Slices):
        near, network = _of_tori(topology, topology.slices)
    elif isinstance(topology, Hosts):
        near, network = _of_hosts(topology)
    else:
        near, network = Link("link", 0.0, _NETWORK_S, ""), Link("network", 0.0, _NETWORK_S, "")
    near_bytes_per_s, far_bytes_per_s = map(as_number, given.values())
    return Links(_filled(near, near_bytes_per_s), _filled(network, far_bytes_per_s))


def _filled(link: Link, given: float | None) -> Link | None:
    if given is not None:
        return link._replace(bytes_per_s=float(given), source=_GIVEN)
    return link if link.bytes_per_s else None


def _of_tori(topology: Topology, tori: Sequence[Torus]) -> tuple[Link, Link]:
    """Return the ICI, and a host's network; of several generations, the slowest."""
    known = [GENERATIONS.get(torus.generation) for torus in tori]
    hop_s = max(
        (generation.latency_s for generation in known if generation),
        default=GENERATIONS["v5p"].latency_s,
    )
    ici = min(generation.link_bytes_per_s if generation else 0.0 for generation in known)
    source = ", ".join(sorted({generation.source for generation in known if generation}))
    chips = sum(torus.num_chips for torus in tori) / len(set(topology.processes.ravel().tolist()))
    dcn = chips * min(_DCN.get(torus.generation, 0.0) for torus in tori)
    network = Link("DCN", dcn, _NETWORK_S, "Cloud TPU: DCN bandwidth per chip")
    return Link("ICI", ici, hop_s, source), network


def _of_hosts(hosts: Hosts) -> tuple[Link, Link]:
    if hosts.on != "gpu":
        return Link("in host", 0.0, _NVLINK_S, ""), Link("network", 0.0, _NETWORK_S, "")
    nics = hosts.devices * _NIC
    return (
        Link("NVLink", _NVLINK, _NVLINK_S, "DGX H100: NVLink 4"),
        Link("network", nics, _NETWORK_S, f"DGX H100: {hosts.devices} NICs of 400 Gbit/s a host"),
    )
