"""Check that all processes of a new mesh see the same devices, and agree on who owns them.

JAX gives every process a list of all devices, and no process compares its list with another's. A
broken chip, a process that fell back to the CPU, or two mixed-up jobs make the lists differ;
programs compiled for them exchange wrong data, or hang. So the processes meet before the mesh is
used: a digest of the list (ids, owners, coordinates, in mesh order) is compared in one round trip,
along with a digest of what each process's own devices report. DTensor merges the coordinates by an
all-reduce over the very devices that are to be described, and compares nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shoal.errors import DeadlineError, DivergenceError
from shoal.hashing import short_digest
from shoal.plan.mesh import Mesh
from shoal.plan.notation.words import runs_to_text
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.outcomes import ThisProcess, disagreement
from shoal.runtime.jax_service.jax_runtime import NothingPublishedError
from shoal.runtime.jax_service.process_numbers import processes_of
from shoal.runtime.system import fault_points
from shoal.runtime.system.callsite import line_of


def owners_of(client: JobClient, devices: Sequence[Any], timeout_s: float) -> tuple[int, ...]:
    """Return the processes that own these devices, by job number; for no devices, all processes.

    On TPUs JAX may number processes differently; the processes then exchange their numbers.

    Raises:
      DeadlineError: one of them did not send its number in time.
    """
    owners = {device.process_index for device in devices}
    if not owners or len(owners) == client.num_processes:
        return tuple(range(client.num_processes))
    if owners == {jax.process_index()}:
        return (client.process,)
    if devices[0].platform != "tpu":
        return tuple(sorted(owners))
    try:
        numbers = processes_of(owners, client.process, timeout_s=timeout_s)
    except NothingPublishedError as error:
        me = ThisProcess(client.process, client.hosts)
        raise DeadlineError(
            f"{me}: make_mesh: the processes that are {sorted(owners)} in JAX own its devices, and "
            f"have not all called it within {timeout_s:g} s ({error})",
            name="make_mesh",
            waited_s=timeout_s,
        ) from None
    return tuple(sorted(numbers.values()))


class View(NamedTuple):
    """The devices as one process sees them, as reported by JAX."""

    process: int  # its own number in JAX
    devices: Sequence[Any]  # of the mesh, in the order of the call
    own: Sequence[Any]  # those of them that this process owns


class _Meeting(NamedTuple):
    """The call in which the processes meet."""

    client: JobClient
    call: Call
    group: tuple[int, ...] | None
    lane: str
    timeout_s: float

    def exchange(self, payload: bytes, *spec: str) -> Mapping[int, bytes]:
        """Meet the other processes in one round; return the payloads of all."""
        call = self.call._replace(spec=spec) if spec else self.call
        return agree(
            self.client,
            call,
            payload,
            timeout_s=self.timeout_s,
            group=self.group,
            lane=self.lane,
        )


def agree_on_devices(
    client: JobClient,
    mesh: Mesh,
    view: View,
    *,
    options: Sequence[str],
    site: str,
    group: tuple[int, ...] | None,
    lane: str,
    timeout_s: float,
) -> None:
    """Return once all processes make the same mesh of the same devices.

    Args:
      client: the job client of this process, through which it meets the others.
      mesh: the mesh, with devices in order.
      view: what this process sees.
      options: further lines that must be equal.
      site: the call site; shown, not compared: equal calls give equal meshes anywhere.
      group: the processes that meet; None: all of the job.
      lane: the line of execution.
      timeout_s: deadline.

    Raises:
      DivergenceError: on all that arrived: calls, lists of devices or owners differ; the first
        difference is shown, with the processes on each side.
      DeadlineError, ProcessLostError, PeerFailedError: as `JobClient.arrive`.
    """
    lines = [_line(device) for device in view.devices]
    kinds = ", ".join(sorted({device.platform for device in view.devices}))
    axes = " ".join(f"{name}={size}" for name, size in mesh.axes.items())
    spec = (
        f"axes {axes or 'none'}",
        f"options {', '.join(options) or 'none'}",
        f"{len(lines)} {kinds} devices",
        *lines,
        f"order {runs_to_text(mesh.device_ids.ravel())}",
    )
    call = Call("make_mesh", mesh.label or "make_mesh", site, spec)
    meeting = _Meeting(client, call, group, lane, timeout_s)
    own = sorted(_line(device) for device in view.own)
    fault_points.reach("make_mesh.before_arrive", client.process)
    answers = meeting.exchange(json.dumps([view.process, _digest(own)]).encode())
    fault_points.reach("make_mesh.after_arrive", client.process)
    claims = {process: tuple(json.loads(text)) for process, text in answers.items()}
    _check_numbers(meeting, {process: index for process, (index, _) in claims.items()})
    believed: dict[int, list[str]] = {index: [] for index, _ in claims.values()}
    for device, line in zip(view.devices, lines, strict=True):
        believed.setdefault(device.process_index, []).append(line)
    wrong = [
        p for p, (index, digest) in claims.items() if digest != _digest(sorted(believed[index]))
    ]
    if wrong:
        raise _other_owners(meeting, own, {p: claims[p][0] for p in wrong}, believed)


def _line(device: Any) -> str:
    """Describe a device as it reports itself: `device 5: tpu, TPU v4, process 1, at (1, 1, 0)`."""
    parts = [f"device {device.id}: {device.platform}"]
    if device.device_kind and device.device_kind != device.platform:
        parts.append(device.device_kind)
    parts.append(f"process {device.process_index}")
    coords = getattr(device, "coords", None)
    if coords is not None:
        parts.append(f"at {tuple(coords)}")
    core = getattr(device, "core_on_chip", None)
    if core is not None:
        parts.append(f"core {core}")
    slice_index = getattr(device, "slice_index", None)
    if slice_index is not None:
        parts.append(f"slice {slice_index}")
    return ", ".join(parts)


def _digest(lines: Sequence[str]) -> str:
    return short_digest("\n".join(lines).encode()).hex()


def _heading(meeting: _Meeting) -> str:
    client, call = meeting.client, meeting.call
    me = ThisProcess(client.process, client.hosts)
    label = "" if call.name == call.operation else f" {call.name!r}"
    return f"{me}: make_mesh{label} ({line_of(call.site)})"


def _check_numbers(meeting: _Meeting, numbers: Mapping[int, int]) -> None:
    """Raise if two processes have the same number in JAX: they are in different JAX jobs."""
    holders: dict[int, list[int]] = {}
    for process, index in numbers.items():
        holders.setdefault(index, []).append(process)
    if len(holders) < len(numbers):
        rows = [(f"is process {index} in JAX", tuple(held)) for index, held in holders.items()]
        advice = "JAX's job is not the same as shoal's: initialize both together"
        raise disagreement(f"{_heading(meeting)}: numbers in JAX differ", rows, advice)


def _other_owners(
    meeting: _Meeting,
    own: Sequence[str],
    wrong: Mapping[int, int],
    believed: Mapping[int, Sequence[str]],
) -> DivergenceError:
    """Return the error about processes whose own devices contradict the common list.

    For each, it shows the first of its devices that is not in the list, or else the first in the
    list that it does not have.
    """
    me = meeting.client.process
    shown = _strange(own, sorted(believed[wrong[me]])) if me in wrong else ""
    answers = meeting.exchange(shown.encode(), "own devices")
    rows = [(answers[process].decode(errors="replace"), (process,)) for process in wrong]
    heading = (
        f"{_heading(meeting)}: some processes own devices that differ from the device list "
        "that all processes share"
    )
    advice = "a likely hardware fault, or two jobs mixed up: restart the job without that host"
    return disagreement(heading, rows, advice)


def _strange(own: Sequence[str], listed: Sequence[str]) -> str:
    """Describe the first difference between a process's own devices and those it should have."""
    for line in own:
        if line not in listed:
            named = line.partition(":")[0]
            other = next(
                (known for known in listed if known.startswith(f"{named}:")), "no such device"
            )
            return f"has {line}; the list has {other}"
    missing = next(line for line in listed if line not in own)
    return f"lacks a device of the list: {missing}"
