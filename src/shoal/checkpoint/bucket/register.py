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
from shoal.checkpoint.store.interface import already_committed, confirmed, ended_error, located
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
        seen = read(objects)
        wanted = act(seen.register)
        if wanted is None:
            return seen.register
        problem: StorageError
        try:
            if is_single_writer or seen.register.is_single_writer:
                _put(objects.put, replace(wanted, is_single_writer=True))
            elif seen.version is None:
                _put(objects.put_new, wanted)
            else:
                _put(objects.put_over, wanted, seen.version)
            continue
        except UnclearError as error:
            problem = error
        except FileExistsError:  # it was changed; or by ourselves, as reading will show
            message = f"{objects.url}: other processes changed COMMIT all the time"
            problem = StorageError(message, path=objects.url)
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

    def act(current: Register) -> Register | None:
        over: tuple[str, ...] = ()
        if current.commit is not None:
            if current.commit.attempt == commit.attempt:
                return None
            if current.commit.attempt != replaced or current.is_pinned:
                raise already_committed(path, current.commit, replaced)
            over = (replaced,)
        if commit.attempt in current.ended:
            raise ended_error(path, commit.attempt, "commit")
        ends = (*current.ended, *over)
        if over:
            # One place may be replaced for years, and the register is of limited size. What an
            # attempt replaces is committed while it begins: those that are forgotten here began
            # earlier, so none of them can be committed any more. Only one that replaces nothing
            # could: after that many replacements and a deletion, by a process that was frozen since
            # before them, between its last look at its files and its write.
            ends = ends[-_MOST_ENDS:]
        return replace(current, commit=commit, ended=ends)

    return act


def ending(attempt: str) -> Change:
    """End an attempt, unless it is committed."""

    def act(current: Register) -> Register | None:
        is_committed = current.commit is not None and current.commit.attempt == attempt
        if is_committed or attempt in current.ended:
            return None
        return replace(current, ended=(*current.ended, attempt))

    return act


def deleting(attempt: str) -> Change:
    """Undo the commit of an attempt, and end it, unless it is pinned."""

    def act(current: Register) -> Register | None:
        if current.commit is None or current.commit.attempt != attempt or current.is_pinned:
            return None
        return replace(current, commit=None, ended=(*current.ended, attempt))

    return act


def pinning(current: Register) -> Register | None:
    """Pin what is committed."""
    if current.commit is None or current.is_pinned:
        return None
    return replace(current, is_pinned=True)


def unpinning(current: Register) -> Register | None:
    """Undo `pinning`."""
    return replace(current, is_pinned=False) if current.is_pinned else None
