"""The register of a step: what is committed, ended and pinned, in one object that is never removed.

A change is a function of the register that was read, and returns the register to write, or None if
there is nothing to change any more. It is called again after every write, also a successful one: so
what is true in the end was read, and not concluded from the answer to a write.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from shoal.checkpoint.bucket.objects import Objects, UnclearError
from shoal.checkpoint.format.json_files import decode_register, encode_register
from shoal.checkpoint.format.records import Commit, Register
from shoal.checkpoint.store.interface import confirmed, ended, located, taken
from shoal.checkpoint.store.step_names import COMMIT
from shoal.errors import StorageError

Change = Callable[[Register], Register | None]

_PAUSE_S = 0.05  # before the second try, at most; doubled for each further one
_LONGEST_PAUSE_S = 5.0
_MOST_ENDS = 1000  # that a replacement leaves


class Read(NamedTuple):
    """The register as it was read."""

    register: Register
    version: str | None  # None: there is none yet


def read(objects: Objects) -> Read:
    """Read the register.

    Raises:
      CorruptCheckpointError, UnsupportedCheckpointError: it cannot be read.
    """

    def look() -> Read:
        data, version = objects.read(COMMIT)
        with located(objects.url):
            return Read(decode_register(data), version)

    try:
        return confirmed(look)
    except FileNotFoundError:
        return Read(Register(), None)


def change(
    objects: Objects, act: Change, *, timeout_s: float, is_single_writer: bool = False
) -> Register:
    """Change the register, and return it as it is then.

    Args:
      is_single_writer: the user says that no other process writes: no conditions are needed.

    Raises:
      What `act` raises.
      StorageError: the bucket could not be asked, or others changed it all the time.
    """
    limit, pause_s = time.monotonic() + timeout_s, _PAUSE_S
    while True:
        found = read(objects)
        wanted = act(found.register)
        if wanted is None:
            return found.register
        problem: StorageError
        try:
            if is_single_writer or found.register.is_single_writer:
                _put(objects.put, replace(wanted, is_single_writer=True))
            elif found.version is None:
                _put(objects.put_new, wanted)
            else:
                _put(objects.put_over, wanted, found.version)
            continue
        except UnclearError as error:
            problem = error
        except FileExistsError:  # it was changed; or by ourselves, as reading will show
            words = f"{objects.url}: other processes changed COMMIT all the time"
            problem = StorageError(words, path=objects.url)
        if time.monotonic() + pause_s > limit:
            raise problem
        threading.Event().wait(pause_s * random.random())
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _put(put: Callable[..., None], register: Register, *condition: str) -> None:
    # Versions may be hashes of the contents: without a nonce, A → B → A would look unchanged.
    put(COMMIT, encode_register(replace(register, nonce=secrets.token_hex(8))), *condition)


# ---- The changes. Each may find that another process has made it, or made it impossible.


def committing(path: str, commit: Commit, replaced: str = "") -> Change:
    """Commit an attempt, unless another one is committed, or this one is ended.

    Args:
      replaced: an attempt that this one replaces where it is committed and not pinned: the same
        change ends it, so that none of its processes commits it again once its files are removed.
    """

    def act(found: Register) -> Register | None:
        over: tuple[str, ...] = ()
        if found.commit is not None:
            if found.commit.attempt == commit.attempt:
                return None
            if found.commit.attempt != replaced or found.is_pinned:
                raise taken(path, found.commit, replaced)
            over = (replaced,)
        if commit.attempt in found.ended:
            raise ended(path, commit.attempt, "commit")
        ends = (*found.ended, *over)
        if over:
            # One place may be replaced for years, and the register is of limited size. What an
            # attempt replaces is committed while it begins: those that are forgotten here began
            # earlier, so none of them can be committed any more. Only one that replaces nothing
            # could: after that many replacements and a deletion, by a process that was frozen since
            # before them, between its last look at its files and its write.
            ends = ends[-_MOST_ENDS:]
        return replace(found, commit=commit, ended=ends)

    return act


def ending(attempt: str) -> Change:
    """End an attempt, unless it is committed."""

    def act(found: Register) -> Register | None:
        is_committed = found.commit is not None and found.commit.attempt == attempt
        if is_committed or attempt in found.ended:
            return None
        return replace(found, ended=(*found.ended, attempt))

    return act


def deleting(attempt: str) -> Change:
    """Undo the commit of an attempt, and end it, unless it is pinned."""

    def act(found: Register) -> Register | None:
        if found.commit is None or found.commit.attempt != attempt or found.is_pinned:
            return None
        return replace(found, commit=None, ended=(*found.ended, attempt))

    return act


def pinning(found: Register) -> Register | None:
    """Pin what is committed."""
    if found.commit is None or found.is_pinned:
        return None
    return replace(found, is_pinned=True)


def unpinning(found: Register) -> Register | None:
    """Undo `pinning`."""
    return replace(found, is_pinned=False) if found.is_pinned else None
