"""Where the processes of a job meet: at an address, or in a directory with process 0's address."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from shoal.hashing import short_digest
from shoal.runtime.startup.launched_by import launcher_of
from shoal.runtime.startup.launcher_table import Launcher, jax_address, shown, variables_of
from shoal.runtime.startup.local_devices import LocalPlace
from shoal.runtime.startup.rendezvous import Rendezvous, local_base
from shoal.runtime.wire.frames import split_address

Environment = Mapping[str, str]
ON_THIS_HOST = "a directory of this host"
_SET = (
    "set SHOAL_RENDEZVOUS=/a/directory that all hosts share, or SHOAL_COORDINATOR=host:port (a "
    "free port on the host of process 0), for all processes, or pass coordinator_address="
)


class MeetsAt(NamedTuple):
    """An address or a rendezvous, and its source; neither after a problem."""

    address: str | None = None
    rendezvous: Rendezvous | None = None
    source: str = ""


class Launched(NamedTuple):
    """The launcher of this process, and the values it sets besides index and count."""

    launcher: Launcher
    env: Environment  # completed
    num_processes: int
    local: LocalPlace

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes are on this host."""
        return self.local.processes == self.num_processes

    @property
    def words(self) -> str:
        """The launcher's variables for this process, if any of them identifies the job; else ""."""
        launcher = self.launcher
        if not variables_of(self.env, launcher.job):
            return ""
        return f"{launcher.name}: {shown(variables_of(self.env, launcher.own))}"


def meets_at(
    given: str | None, env: Environment, launched: Launched | None, problems: list[str]
) -> MeetsAt:
    """Return where the job meets.

    The first source that is set: the argument, SHOAL_COORDINATOR, SHOAL_RENDEZVOUS,
    JAX_COORDINATOR_ADDRESS, the launcher. Without any, and with all processes of the launcher on
    this host, they meet in a directory of this host.
    """
    directory = env.get("SHOAL_RENDEZVOUS", "").strip()
    sources = [
        ("coordinator_address", given),
        ("SHOAL_COORDINATOR", env.get("SHOAL_COORDINATOR")),
        ("SHOAL_RENDEZVOUS", directory),
        ("JAX_COORDINATOR_ADDRESS", jax_address(env)),
    ]
    for source, said in sources:
        if said and source == "SHOAL_RENDEZVOUS":
            return _in_directory(directory, launched, problems)
        if said:
            return _at(said, source, problems)
    if launched is None:
        problems.append(f"no address given: {_SET}")
        return MeetsAt()
    said = launched.launcher.address(launched.env)
    if said:
        return _at(said, launched.launcher.name, problems)
    if launched.is_on_one_host:
        return MeetsAt(None, _here(launched), ON_THIS_HOST)
    problems.append(_no_address(launched))
    return MeetsAt()


def _at(address: str, source: str, problems: list[str]) -> MeetsAt:
    try:
        split_address(address)
    except (ValueError, AttributeError, TypeError):
        problems.append(f"{source}={address!r} is not an address: give host:port")
    return MeetsAt(address, None, source)


def _in_directory(directory: str, launched: Launched | None, problems: list[str]) -> MeetsAt:
    if not os.path.isabs(directory):
        problems.append(f"SHOAL_RENDEZVOUS={directory!r} must be an absolute path: give /a/folder")
    return MeetsAt(None, Rendezvous(directory, _name(launched), False), "SHOAL_RENDEZVOUS")


def _here(launched: Launched) -> Rendezvous:
    launcher, env = launched.launcher, launched.env
    # Those with a blank in their name are not the process's: `completed` has added them.
    own = [f"{name}={env[name]}" for name in launcher.own if name in env and " " not in name]
    return Rendezvous(local_base(), _name(launched, launcher_of(own, launcher.daemon)), True)


def _name(launched: Launched | None, *more: str) -> str:
    """Return the name of this job's directory, equal on all its processes."""
    if launched is None:
        return "shoal-job"
    name = re.sub("[^a-z0-9]+", "-", launched.launcher.name.lower()).strip("-")
    values = [launched.env.get(variable, "").strip() for variable in launched.launcher.job]
    key = "\n".join([*values, *more]).encode()
    return f"shoal-{name}-{short_digest(key).hex()}"


def _no_address(launched: Launched) -> str:
    launcher, local = launched.launcher, launched.local
    if "JOB_COMPLETION_INDEX" in launched.env:
        return (
            f"{launcher.name} gives no address, and the pod has no name in a headless service: "
            f"name one as `subdomain` of its template, or {_SET}"
        )
    hosts = "its processes are on several hosts"
    if local.processes is None:
        hosts = "nothing shows that all processes are on one host"
    shown = f" ({local.words})" if local.words else ""
    return f"{launcher.name} gives no address of process 0, and {hosts}{shown}: {_SET}"
