"""Power is lost at any moment of a save, a deletion, a recovery: what was saved is still whole.

Each scenario is run once on a disk that records. Then, for every prefix of the record and what
may have been lost after it, the disk is looked at and cleaned up as the next run does.
"""

from __future__ import annotations

import ast
import copy
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.forgetful_file_system import Crash, Disk, crash
from shoal.checkpoint.disk import committing, step_folder, sweep
from shoal.testing.store_contract import Save, names_of, value_of

FIRST, SECOND = Save("00000000000a", value=7), Save("00000000000b", value=9)
ALONE = Save("00000000000a", value=7, processes=1)
PATH = "/run/step_000000000005"
ALL_OUTCOMES = 64  # up to so many are all looked at, else the most telling and some random ones


class Torn(Exception):
    """Something committed is not whole, lost, or back."""


@dataclass
class Scenario:
    """What is done on a disk, and which attempts may be committed before, during and after it."""

    prepare: Callable[[Disk], None]
    do: Callable[[Disk], None]
    during: tuple[str, ...]  # "" stands for none
    after: tuple[str, ...]  # when `do` has returned
    replaces: bool = False  # B is to replace A, and may be complete: the cleaning commits it

    def kept_as(self, attempt: str) -> tuple[str, ...]:
        """Return what may be committed later where this attempt is."""
        return (A, B) if self.replaces and attempt == A else (attempt,)


def _one(disk: Disk):
    return disk.folder(PATH)


def _nothing(disk: Disk) -> None:
    pass


def _save_on_two_hosts(disk: Disk) -> None:
    lead, other = disk.folder(PATH, "lead"), disk.folder(PATH, "other")
    FIRST.begin(lead)
    FIRST.write(lead, 0)
    FIRST.write(other, 1)
    committing.commit(other, FIRST.attempt)


def _begun_on_a_third_host(disk: Disk) -> None:
    FIRST.begin(disk.folder(PATH, "third"))
    FIRST.write(disk.folder(PATH, "lead"), 0)
    FIRST.write(disk.folder(PATH, "other"), 1)
    committing.commit(disk.folder(PATH, "other"), FIRST.attempt)


def _lead_commits(disk: Disk) -> None:
    lead, other = disk.folder(PATH, "lead"), disk.folder(PATH, "other")
    FIRST.begin(lead)
    FIRST.write(other, 1)
    FIRST.write(lead, 0)
    committing.commit(lead, FIRST.attempt)


def _not_tidied(disk: Disk) -> None:
    """Leave what a crash right after the link of COMMIT leaves."""
    folder = _one(disk)
    FIRST.prepare(folder)
    committing._link(folder, FIRST.attempt)


def _linked_and_recovered(disk: Disk) -> None:
    """The process that linked COMMIT dies before its fsync; the host lives on."""
    FIRST.prepare(_one(disk))
    committing._link(_one(disk), FIRST.attempt)
    sweep.recover_step(_one(disk))


def _renamed_by_mistake(disk: Disk) -> None:
    """Leave what a deletion leaves that was frozen before its rename, and died after it."""
    folder = _one(disk)
    SECOND.save(folder)
    folder.rename("COMMIT", f"DELETING-{FIRST.attempt}")


def _delete_then_save(disk: Disk) -> None:
    sweep.delete_committed(_one(disk), FIRST.attempt)
    SECOND.save(_one(disk))


def _begin_while_removed(disk: Disk) -> None:
    """Begin in a folder that is removed, and made again by others, in between."""
    folder, other = _one(disk), _one(disk)
    make = folder.make

    def made_and_lost() -> None:
        make()
        if not folder.names():
            other.remove_folder()
            number = next(disk.numbers)
            disk.tables[number] = {}  # who made it has not come to the fsync of the parent
            disk.folder("/run")._note_names(step_000000000005=number)

    folder.make = made_and_lost  # type: ignore[method-assign]
    ALONE.begin(folder)
    ALONE.write(folder, 0)
    committing.commit(folder, ALONE.attempt)


def _second(disk: Disk, first: str = "one", other: str = "one") -> None:
    """Do all but the commit of a save that replaces the first one."""
    lead, other_host = disk.folder(PATH, first), disk.folder(PATH, other)
    SECOND.begin(lead, FIRST.attempt)
    SECOND.write(other_host, 1)
    SECOND.write(lead, 0)


def _replace(disk: Disk) -> None:
    _second(disk)
    committing.commit(_one(disk), SECOND.attempt, FIRST.attempt)


def _replace_on_two_hosts(disk: Disk) -> None:
    _second(disk, "lead", "other")
    committing.commit(disk.folder(PATH, "lead"), SECOND.attempt, FIRST.attempt)


def _renamed_and_recovered(disk: Disk) -> None:
    """The process that renamed PENDING dies before its fsync; the host lives on."""
    _second(disk)
    committing._link(_one(disk), SECOND.attempt, FIRST.attempt)
    committing.commit(_one(disk), SECOND.attempt, FIRST.attempt)


def _replace_then_delete(disk: Disk) -> None:
    _replace(disk)
    sweep.delete_committed(_one(disk), SECOND.attempt)


A, B = FIRST.attempt, SECOND.attempt
SCENARIOS = {
    "save": Scenario(_nothing, lambda d: ALONE.save(_one(d)), ("", A), (A,)),
    "save on two hosts": Scenario(_nothing, _save_on_two_hosts, ("", A), (A,)),
    "save, the lead commits": Scenario(_nothing, _lead_commits, ("", A), (A,)),
    "begun on a third host": Scenario(_nothing, _begun_on_a_third_host, ("", A), (A,)),
    "recover": Scenario(
        lambda d: FIRST.prepare(_one(d)), lambda d: sweep.recover_step(_one(d)), ("", A), (A,)
    ),
    "recover what is linked": Scenario(_nothing, _linked_and_recovered, ("", A), (A,)),
    "tidy": Scenario(_not_tidied, lambda d: sweep.recover_step(_one(d)), (A,), (A,)),
    "abandon": Scenario(
        lambda d: FIRST.prepare(_one(d)), lambda d: committing.abandon(_one(d), A), ("", A), ("",)
    ),
    "abandon what is committed": Scenario(
        _not_tidied, lambda d: committing.abandon(_one(d), A), (A,), (A,)
    ),
    "delete": Scenario(
        lambda d: FIRST.save(_one(d)), lambda d: sweep.delete_committed(_one(d), A), ("", A), ("",)
    ),
    "delete what is not tidy": Scenario(
        _not_tidied, lambda d: sweep.delete_committed(_one(d), A), ("", A), ("",)
    ),
    "delete, save again": Scenario(
        lambda d: FIRST.save(_one(d)), _delete_then_save, ("", A, B), (B,)
    ),
    "pass back": Scenario(_renamed_by_mistake, lambda d: sweep.recover_step(_one(d)), (B,), (B,)),
    "collect beside a commit": Scenario(
        lambda d: (FIRST.prepare(_one(d)), SECOND.save(_one(d))),
        lambda d: sweep.collect_garbage(_one(d), idle_s=0), (B,), (B,),
    ),
    "save where others make and remove": Scenario(_nothing, _begin_while_removed, ("", A), (A,)),
    "replace": Scenario(lambda d: FIRST.save(_one(d)), _replace, (A, B), (B,), replaces=True),
    "replace what is not tidy": Scenario(_not_tidied, _replace, (A, B), (B,), replaces=True),
    "replace on two hosts": Scenario(
        lambda d: FIRST.save(_one(d)), _replace_on_two_hosts, (A, B), (B,), replaces=True
    ),
    "replace, another process tidies": Scenario(
        lambda d: FIRST.save(_one(d)), _renamed_and_recovered, (A, B), (B,), replaces=True
    ),
    "recover a replacement": Scenario(
        lambda d: (FIRST.save(_one(d)), _second(d)),
        lambda d: sweep.recover_step(_one(d)), (A, B), (B,), replaces=True,
    ),
    "abandon a replacement": Scenario(
        lambda d: (FIRST.save(_one(d)), _second(d)),
        lambda d: committing.abandon(_one(d), B), (A, B), (A,), replaces=True,
    ),
    "replace, delete": Scenario(
        lambda d: FIRST.save(_one(d)), _replace_then_delete, ("", A, B), ("",), replaces=True
    ),
}  # fmt: skip


def _recorded(scenario: Scenario, disk: Disk | None = None) -> tuple[Disk, Disk]:
    """Return the disk before and after."""
    disk = disk or Disk()
    scenario.prepare(disk)
    disk.log.clear()
    start = copy.copy(disk)
    start.contents, start.log = dict(disk.contents), []
    start.tables = {number: dict(table) for number, table in disk.tables.items()}
    scenario.do(disk)
    return start, disk


def _numbers(after: Crash, chance: random.Random) -> Iterator[int]:
    """Yield outcomes to look at: all; or nothing lost, all lost, one lost, one kept, and some."""
    last = after.num_outcomes - 1
    if last < ALL_OUTCOMES:
        yield from range(last + 1)
        return
    yield from (0, last)
    for position in range(len(after.pending)):
        yield 1 << position
        yield last ^ (1 << position)
    for _ in range(8):
        yield chance.randint(0, last)


def _check(
    disk: Disk,
    allowed: tuple[str, ...],
    kept_as: Callable[[str], tuple[str, ...]],
) -> None:
    """Look at a disk after a crash as the next run does; clean up; look again."""
    folder = disk.folder(PATH)
    try:
        before = step_folder.folder_state(folder).commit
        if before:
            value_of(folder, before)
        sweep.recover_step(folder)
        sweep.collect_garbage(folder, idle_s=0)
        commit = step_folder.committed(folder)
        found = commit.attempt if commit else ""
        if before and found not in kept_as(before.attempt):
            raise Torn("what was committed is lost by the cleaning")
        if found not in allowed:
            raise Torn(f"{found or 'nothing'} is committed, not one of {allowed}")
        if commit and value_of(folder, commit) != (7 if found == A else 9):
            raise Torn("it has the other's values")
        left = names_of(folder, commit) if commit else []
        if folder.names() != left:
            raise Torn(f"{set(folder.names()) ^ set(left)} should not remain, or should")
    except Torn:
        raise
    except Exception as error:
        raise Torn(f"{type(error).__name__}: {error}") from error


def _check_all(scenario: Scenario, muted: Callable[[], bool] = lambda: False) -> int:
    start, disk = _recorded(scenario, Disk(muted=muted))
    chance = random.Random(1)
    seen: set[object] = set()
    for length in range(len(disk.log) + 1):
        after = crash(start, disk.log, length)
        is_done = length == len(disk.log)
        allowed = scenario.after if is_done else scenario.during
        for number in _numbers(after, chance):
            there = after.outcome(number)
            key = (is_done, hash(there.frozen()))
            if key not in seen:
                seen.add(key)
                _check(there, allowed, scenario.kept_as)
    return len(seen)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_prefix_leaves_the_previous_or_the_new_step(name):
    assert _check_all(SCENARIOS[name]) > 3


@settings(max_examples=150)
@given(st.sampled_from(sorted(SCENARIOS)), st.data())
def test_a_second_loss_while_the_first_is_cleaned_up(name, data):
    scenario = SCENARIOS[name]
    start, disk = _recorded(scenario)
    length = data.draw(st.integers(0, len(disk.log)))
    allowed = scenario.after if length == len(disk.log) else scenario.during
    after = crash(start, disk.log, length)
    number = data.draw(st.integers(0, after.num_outcomes - 1))
    _check(after.outcome(number), allowed, scenario.kept_as)

    def clean(there: Disk) -> None:
        sweep.recover_step(_one(there))
        sweep.collect_garbage(_one(there), idle_s=0)

    start, disk = _recorded(Scenario(_nothing, clean, allowed, allowed), after.outcome(number))
    if before := step_folder.committed(_one(start)):
        allowed = scenario.kept_as(before.attempt)
    after = crash(start, disk.log, data.draw(st.integers(0, len(disk.log))))
    number = data.draw(st.integers(0, after.num_outcomes - 1))
    _check(after.outcome(number), allowed, scenario.kept_as)


def _fsyncs() -> list[tuple[str, int]]:
    """Return file and line of each fsync of a folder in the code of attempts."""
    found = []
    for module in (committing, sweep):
        source = Path(module.__file__).read_text()
        for function in ast.parse(source).body:
            if isinstance(function, ast.FunctionDef) and function.name != "_write_pending":
                # What that one makes is made durable once more as soon as it cannot go.
                found += [
                    (module.__file__, node.lineno)
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call)
                    and ast.unparse(node.func) in ("folder.sync", "folder.make")
                ]
    return found


@pytest.mark.parametrize("site", _fsyncs(), ids=lambda site: f"{Path(site[0]).stem}:{site[1]}")
def test_no_fsync_can_be_left_out(site):
    def muted() -> bool:
        frame = sys._getframe()
        while frame:
            if (frame.f_code.co_filename, frame.f_lineno) == site:
                return True
            frame = frame.f_back
        return False

    def is_torn(name: str) -> bool:
        try:
            _check_all(SCENARIOS[name], muted)
        except Torn:
            return True
        return False

    assert any(is_torn(name) for name in SCENARIOS)
