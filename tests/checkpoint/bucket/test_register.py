"""All interleavings of the requests of processes that commit, replace, end, delete and pin a step.

A process reads the register, decides, and writes under the condition that it is still what was
read. A write may arrive at once, or at any later time, when its process has long gone on: its
answer was lost. Any process may stop at any time, which needs no rule of its own: what holds in
every state that can be reached holds also if nothing more happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from shoal.checkpoint.bucket import register
from shoal.checkpoint.bucket.objects import MemoryObjects
from shoal.checkpoint.format.json_files import decode_commit, decode_register, encode_register
from shoal.checkpoint.format.records import Blob, Commit, Register, index_name, manifest_name
from shoal.errors import CorruptCheckpointError, ShoalError, UsageError

A, B, C = "00000000000a", "00000000000b", "00000000000c"


class Metrics(dict):
    """As a value that can be part of a state."""

    def __hash__(self):
        return 0


def commit_of(attempt):
    blobs = [Blob(name(attempt), 1, "0" * 64) for name in (manifest_name, index_name)]
    return Commit(attempt, 5, 1, *blobs, data_bytes=1, num_files=1, metrics=Metrics())


class Actor(NamedTuple):
    """What one process does: a change, and then perhaps the removal of an attempt's data."""

    act: register.Change
    removes: str = ""
    is_free_to_remove: Callable[[Register], bool] = lambda found: True
    replaces: tuple[str, str] | None = None  # the attempts before and after


def committer(attempt):
    return Actor(register.committing("here", commit_of(attempt)))


def replacer(old, new):
    """A commit in place of a damaged one, whose data is removed afterwards."""
    act = register.committing("here", commit_of(new), old)
    return Actor(act, old, lambda found: old in found.ended, (old, new))


def sweeper(attempt):
    def is_ended(found):
        return found.commit is None or found.commit.attempt != attempt

    return Actor(register.ending(attempt), attempt, is_ended)


def retention(attempt):
    return Actor(register.deleting(attempt), attempt, lambda found: attempt in found.ended)


class Process(NamedTuple):
    """How far one process has come."""

    at: str = "read"  # "read", "write", "remove", "over"
    wanted: Register | None = None
    version: int = -1
    flying: tuple[Register, int] | None = None  # a write that has not arrived yet
    result: Register | str | None = None


class State(NamedTuple):
    register: Register
    version: int
    data: frozenset[str]  # the attempts of which data are there
    processes: tuple[Process, ...]


def landed(state: State, wanted: Register, version: int) -> State:
    """A write arrives."""
    if state.version != version:
        return state
    return state._replace(register=wanted, version=version + 1)


def moves(state: State, actors: tuple[Actor, ...]) -> Iterator[State]:
    """Yield the states after the next request of each process."""
    for number, (actor, process) in enumerate(zip(actors, state.processes, strict=True)):

        def after(to: State, process: Process, number: int = number) -> State:
            before = to.processes
            return to._replace(processes=(*before[:number], process, *before[number + 1 :]))

        if process.flying is not None:
            yield after(landed(state, *process.flying), process._replace(flying=None))
        if process.at == "read":
            try:
                wanted = actor.act(state.register)
            except ShoalError:
                yield after(state, process._replace(at="over", result="refused"))
                continue
            if wanted is not None:
                yield after(
                    state, process._replace(at="write", wanted=wanted, version=state.version)
                )
                continue
            removes = actor.removes and actor.is_free_to_remove(state.register)
            yield after(
                state,
                process._replace(at="remove" if removes else "over", result=state.register),
            )
        elif process.at == "write":
            again = process._replace(at="read", wanted=None, version=-1)
            yield after(landed(state, process.wanted, process.version), again)
            if process.flying is None:
                flying = process.wanted, process.version
                yield after(state, again._replace(flying=flying))
        elif process.at == "remove":
            yield after(
                state._replace(data=state.data - {actor.removes}), process._replace(at="over")
            )


def why_wrong(state: State, pins: list[int]) -> str:
    found = state.register
    if found.commit is not None and found.commit.attempt not in state.data:
        return "what is committed has lost its data"
    if found.commit is not None and found.commit.attempt in found.ended:
        return "what is committed is ended"
    for number in pins:
        result = state.processes[number].result
        if isinstance(result, Register) and result.is_pinned and found.commit != result.commit:
            return "what was pinned is gone"
    return ""


def is_overwritten(before: Commit | None, after: Commit | None, allowed) -> bool:
    if before is None or after is None or before.attempt == after.attempt:
        return False
    return (before.attempt, after.attempt) not in allowed


def search(*actors: Actor, at_first: Register | None = None):
    """Return how many states can be reached, and what is wrong in one of them."""
    processes = tuple(Process() for _ in actors)
    first = State(at_first or Register(), 0, frozenset([A, B, C]), processes)
    allowed = {actor.replaces for actor in actors}
    pins = [n for n, actor in enumerate(actors) if actor.act is register.pinning]
    seen, waiting = {first}, deque([first])  # the shortest way to what is wrong
    while waiting:
        state = waiting.popleft()
        if why := why_wrong(state, pins):
            return len(seen), why
        for after in moves(state, actors):
            if is_overwritten(state.register.commit, after.register.commit, allowed):
                return len(seen), "what was committed is overwritten"
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return len(seen), ""


AT_FIRST = Register(commit_of(A))


def test_two_committers_a_rival_a_sweeper_and_a_retention():
    states, why = search(committer(A), committer(A), committer(B), sweeper(A))
    assert why == ""
    assert states > 3000
    states, why = search(committer(A), committer(B), sweeper(A), sweeper(A), retention(A))
    assert why == ""
    assert states > 100_000


def test_two_of_each_that_removes():
    at_first = Register(commit_of(A))
    assert search(committer(A), retention(A), retention(A), sweeper(A), at_first=at_first)[1] == ""
    assert search(committer(A), sweeper(A), sweeper(A), committer(B))[1] == ""


def test_a_pin_and_a_deletion():
    pinner = Actor(register.pinning)
    at_first = Register(commit_of(A))
    states, why = search(pinner, retention(A), committer(A), sweeper(A), at_first=at_first)
    assert why == ""
    assert states > 800
    assert search(pinner, pinner, retention(A), committer(B), at_first=at_first)[1] == ""


def test_a_step_that_is_deleted_and_saved_again():
    at_first = Register(commit_of(A))
    actors = retention(A), committer(B), retention(B), committer(A)
    assert search(*actors, at_first=at_first)[1] == ""


def test_a_replacement_among_committers_a_rival_a_sweeper_and_a_retention():
    instead = replacer(A, B)
    for first in (instead, committer(C)):
        states, why = search(instead, first, sweeper(B), retention(A), at_first=AT_FIRST)
        assert why == ""
        assert states > 40_000
    late = committer(A), retention(B)  # of the step as it was, and of the new one
    assert search(instead, *late, sweeper(A), at_first=AT_FIRST)[1] == ""
    assert search(instead, instead, *late, at_first=AT_FIRST)[1] == ""


def test_two_replacements_of_one_attempt():
    both = replacer(A, B), replacer(A, C)
    for other in (sweeper(C), retention(B)):
        assert search(*both, other, committer(A), at_first=AT_FIRST)[1] == ""


def test_a_pin_and_a_replacement():
    pinner = Actor(register.pinning)
    actors = replacer(A, B), pinner, retention(A), committer(A)
    assert search(*actors, at_first=AT_FIRST)[1] == ""


# ---- the search finds what is wrong with other rules


def without_fence(attempt):
    """A deletion that does not end the attempt: its other processes commit it again."""

    def act(found):
        if found.commit is None or found.commit.attempt != attempt:
            return None
        return replace(found, commit=None)

    return Actor(act, attempt, lambda found: True)


def end_beside_it(attempt):
    """A sweeper that removes data once it has seen no commit, and writes nothing."""
    return Actor(lambda found: None, attempt, lambda found: found.commit is None)


def pinning_blindly(found):
    return replace(found, is_pinned=True) if not found.is_pinned else None


def deleting_what_is_pinned(attempt):
    def act(found):
        if found.commit is None or found.commit.attempt != attempt:
            return None
        return replace(found, commit=None, ended=(*found.ended, attempt))

    return Actor(act, attempt, lambda found: attempt in found.ended)


def replacing(old, new, is_ended=True, is_pinned_seen=True, is_any=False):
    """A replacement as it should be, or without one of its rules."""

    def act(found):
        there = found.commit and found.commit.attempt
        if new in (there, *found.ended) or (found.is_pinned and is_pinned_seen):
            return None
        if there not in (None, old) and not is_any:
            return None
        over = (old,) if there == old and is_ended else ()
        return replace(found, commit=commit_of(new), ended=(*found.ended, *over))

    def is_over(found):
        return found.commit is None or found.commit.attempt != old

    return Actor(act, old, is_over, (old, new))


@pytest.mark.parametrize(
    ("actors", "options", "why"),
    [
        ((without_fence(A), committer(A)), {"at_first": AT_FIRST}, "lost its data"),
        ((end_beside_it(A), committer(A)), {}, "lost its data"),
        (
            (deleting_what_is_pinned(A), Actor(register.pinning)),
            {"at_first": AT_FIRST},
            "pinned is gone",
        ),
        (
            (replacing(A, B, is_ended=False), retention(B), committer(A)),
            {"at_first": AT_FIRST},
            "lost its data",
        ),
        (
            (replacing(A, B, is_pinned_seen=False), Actor(register.pinning)),
            {"at_first": AT_FIRST},
            "pinned is gone",
        ),
        (
            (replacing(A, B, is_any=True), committer(C), retention(A)),
            {"at_first": AT_FIRST},
            "overwritten",
        ),
    ],
    ids=[
        "without a fence",
        "no end in the register",
        "a pin is not looked for",
        "a replaced attempt is not ended",
        "a replacement does not look for a pin",
        "a replacement of whatever is committed",
    ],
)
def test_wrong_rules_are_found(actors, options, why):
    assert why in search(*actors, **options)[1]


def test_no_two_writes_have_equal_bytes():
    """A bucket's version may be a hash of the contents: after pin and unpin it must not be old."""
    objects, seen = MemoryObjects(), set()
    for act in [
        register.committing("here", commit_of(A)),
        *[register.pinning, register.unpinning] * 3,
    ]:
        register.change(objects, act, timeout_s=10)
        seen.add(objects.read("COMMIT")[0])
    assert len(seen) == 7


# ---- its bytes


@pytest.mark.parametrize(
    "found",
    [
        Register(nonce="n"),
        Register(commit_of(A), nonce="n"),
        Register(commit_of(A), (B,), is_pinned=True, nonce="n"),
        Register(None, (A, B), nonce="n"),
    ],
)
def test_register_round_trips(found):
    data = encode_register(found)
    assert decode_register(data) == found
    if found.commit is None:
        with pytest.raises(CorruptCheckpointError):
            decode_commit(data)
    else:
        assert decode_commit(data) == found.commit, "a copy on a disk is a checkpoint"


def test_damage_is_found():
    data = bytearray(encode_register(Register(commit_of(A), (B,), nonce="n")))
    for at in range(0, len(data), 7):
        data[at] ^= 1
        with pytest.raises(CorruptCheckpointError):
            decode_register(bytes(data))
        data[at] ^= 1
    assert decode_register(bytes(data)).ended == (B,)


def test_more_ends_than_it_holds():
    many = tuple(f"{number:012x}" for number in range(5000))
    with pytest.raises(UsageError, match="5000 attempts were ended; save another step"):
        encode_register(Register(ended=many))
