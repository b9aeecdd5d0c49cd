"""The programs that this process has compiled for devices of several processes.

Noted by the threads that compile, and sent by the watcher: see `rules.programs`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

from shoal.hashing import content_digest
from shoal.runtime.rules.programs import (
    MOST_GROUPS,
    MOST_PROGRAMS,
    MOST_SENT,
    MOST_TEXT,
    CompiledProgram,
    Differences,
    Noted,
    Owners,
)

_TYPES = 3  # arguments whose types are shown
_MODULE = re.compile(rb"module @\"?([^\s\"]+)")
_MAIN = re.compile(rb"@main\((.*)")
_ARGUMENT = re.compile(rb"%arg\d+: tensor<((?:\d+x)*)([^>]*)>")
_COMPLEX = {b"complex<f32": b"c64", b"complex<f64": b"c128"}
# These are called by an address, which differs between processes.
_ADDRESS = re.compile(
    rb'(@(?:CustomSPMDPartitioning|InspectSharding)[^\n]*?)backend_config = "[^"]*"'
)


def program_of(text: bytes, device_ids: Sequence[int], site: str) -> CompiledProgram:
    """Return a program as it is noted.

    Args:
      text: its StableHLO, as `assert_same_program` compares it.
      device_ids: of its devices, in order.

    >>> text = b"module @jit_f {\\n func.func public @main(%arg0: tensor<8x4xf32>) -> () {}}"
    >>> program_of(text, [0, 1], "train.py:3")[1:]
    ('jit(f)', 'f32[8,4]', 2, 'train.py:3')
    """
    module, main = _MODULE.search(text), _MAIN.search(text)
    name = module[1].decode(errors="replace") if module else "a program"
    types = [_type(*argument) for argument in _ARGUMENT.findall(main[1])] if main else []
    shown = ", ".join(types[:_TYPES])
    more = len(types) - _TYPES
    text = without_addresses(text)
    digest = content_digest(text + repr([*device_ids]).encode()).hex()
    kind, _, function = name.partition("_")
    return CompiledProgram(
        digest,
        name=(f"{kind}({function})" if function else name)[:MOST_TEXT],
        types=(f"{shown} and {more} more" if more > 0 else shown)[:MOST_TEXT],
        num_devices=len(device_ids),
        site=site[:MOST_TEXT],
    )


def without_addresses(text: bytes) -> bytes:
    """Return the StableHLO of a program as it is compared between processes."""
    return _ADDRESS.sub(rb"\1", text)


def _type(dims: bytes, element: bytes) -> str:
    kind = _COMPLEX.get(element, element).decode(errors="replace")
    return f"{kind}[{dims.decode().rstrip('x').replace('x', ',')}]"


class ProgramNotes:
    """The notes of one process in its job."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._lock = threading.RLock()  # a signal handler may compile while its thread notes
        self._notes: dict[Owners, list[tuple[CompiledProgram, int]]] = {None: []}
        self._digests: dict[Owners, set[str]] = {}
        self._totals: dict[Owners, int] = {}
        self._sent: dict[Owners, tuple[int, int, int]] = {}  # met, total, number of programs
        self._met: dict[Owners, int] = {}  # written by the main line alone
        self.is_noting = False  # else nothing is sent, and the others do not miss any program
        self.differences = Differences()  # when a loss or another difference became known

    def meet(self, group: Owners) -> None:
        """Count a meeting of the main line with all processes of a group."""
        self._met[group] = self._met.get(group, 0) + 1

    def note(self, owners: Sequence[int], program: CompiledProgram) -> None:
        """Note a program for devices of these processes."""
        key: Owners = None if len(owners) == self._num_processes else tuple(sorted(owners))
        with self._lock:
            if key not in self._notes and len(self._notes) == MOST_GROUPS:
                return
            notes, digests = self._notes.setdefault(key, []), self._digests.setdefault(key, set())
            if program.digest in digests:
                return
            self._totals[key] = self._totals.get(key, 0) + 1
            if len(notes) < MOST_PROGRAMS:
                digests.add(program.digest)
                notes.append((program, self._count(key)))

    def beat(self) -> list[Noted]:
        """Return what has changed since the last heartbeat."""
        if not self.is_noting:
            return []
        groups = [key for key in [*self._met] if key is not None][:MOST_GROUPS]
        met = {key: self._count(key) for key in [*self._notes, *groups]}  # first: see `rules`
        noted, room = [], MOST_SENT
        with self._lock:
            for key, count in met.items():
                notes, total = self._notes.get(key, []), self._totals.get(key, 0)
                _, _, begin = before = self._sent.get(key, (0, 0, 0))
                new = notes[begin : begin + room]
                now = count, total, begin + len(new)
                if key not in self._sent or now != before:
                    self._sent[key] = now
                    noted.append(Noted(key, count, total, new))
                    room -= len(new)
        return noted

    def _count(self, owners: Owners) -> int:
        """Return the number of meetings with all of these."""
        of_all = self._met.get(None, 0)
        return of_all if owners is None else of_all + self._met.get(owners, 0)
