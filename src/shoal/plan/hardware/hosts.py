"""Topologies without described links: hosts of devices, and devices alone."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from shoal.errors import raise_all
from shoal.plan.hardware.wiring import PLAIN, Numbering, Topology
from shoal.plan.hardware.wiring_checks import sizes_of

IntArray = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Hosts(Topology):
    """Hosts of n devices each, such as GPU nodes and CPU hosts.

    Args:
      count: how many hosts; a process each.
      devices: the devices of each, with fast connections between them.
      on: the platform, "gpu" or "cpu".
      switch: hosts behind one switch, with faster connections than across switches; None: all.

    Raises:
      UsageError: names all problems.
    """

    count: int
    devices: int
    on: str = "gpu"
    switch: int | None = None
    numbering: Numbering = PLAIN

    def __post_init__(self) -> None:
        problems: list[str] = []
        sizes_of((self.count,), "count", problems)
        sizes_of((self.devices,), "devices", problems)
        if self.on not in ("gpu", "cpu"):
            problems.append(f"on={self.on!r} is neither 'gpu' nor 'cpu'")
        if self.switch is not None and sizes_of((self.switch,), "switch", problems):
            if not problems and self.count % self.switch:
                problems.append(f"{self.count} hosts do not divide into groups of {self.switch}")
        raise_all("Hosts", problems)

    @property
    def platform(self) -> str:
        """As given."""
        return self.on

    @property
    def grid(self) -> tuple[int, ...]:
        """Switch groups if there are any, hosts, devices."""
        if self.switch is None:
            return (self.count, self.devices)
        return (self.count // self.switch, self.switch, self.devices)

    def _processes(self) -> IntArray:
        return np.repeat(np.arange(self.count), self.devices).reshape(self.grid)

    @property
    def text(self) -> str:
        """`gpu:4 hosts x 8`."""
        groups = "" if self.switch is None else f" switch={self.switch}"
        return f"{self.on}:{self.count} hosts x {self.devices}{groups}"


@dataclasses.dataclass(frozen=True)
class Flat(Topology):
    """Devices of unknown arrangement."""

    count: int
    on: str = "cpu"
    numbering: Numbering = PLAIN

    def __post_init__(self) -> None:
        problems: list[str] = []
        sizes_of((self.count,), "count", problems)
        if self.on not in ("cpu", "gpu", "tpu"):
            problems.append(f"on={self.on!r} is not one of 'cpu', 'gpu', 'tpu'")
        raise_all("Flat", problems)

    @property
    def platform(self) -> str:
        """As given."""
        return self.on

    @property
    def grid(self) -> tuple[int, ...]:
        """One line."""
        return (self.count,)

    def _processes(self) -> IntArray:
        return np.zeros(self.grid, np.int64)

    @property
    def text(self) -> str:
        """`flat:8`; if they are not CPUs, `flat:8 on=tpu`."""
        return f"flat:{self.count}" + (f" on={self.on}" if self.on != "cpu" else "")
