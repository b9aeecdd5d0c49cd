"""The objects below a prefix as a store. See `bucket`."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from shoal import settings
from shoal.checkpoint.bucket import register
from shoal.checkpoint.bucket.objects import ObjectInfo, Objects, PrefixContents
from shoal.checkpoint.bucket.register import Change
from shoal.checkpoint.format.json_files import (
    decode_manifest,
    decode_register,
    encode_manifest,
    encode_register,
)
from shoal.checkpoint.format.records import (
    Commit,
    Manifest,
    Part,
    Register,
    index_name,
    manifest_name,
    part_name,
)
from shoal.checkpoint.format.table_files import encode_index, encode_part
from shoal.checkpoint.store.assemble import assemble, blob_record, commit_of
from shoal.checkpoint.store.interface import (
    Attempt,
    Got,
    Left,
    OpenFile,
    Pace,
    Store,
    StoreState,
    already_committed,
    confirmed,
    ended_error,
    incomplete_error,
    located,
)
from shoal.checkpoint.store.opening import read_blob
from shoal.checkpoint.store.step_names import (
    COMMIT,
    STEPS,
    Listing,
    check_place,
    new_attempt,
    pending_name,
    step_name,
    step_of,
    temporary_name,
)
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    SaveAbortedError,
    StepAlreadyCommittedError,
    StorageError,
    UnsupportedCheckpointError,
)
from shoal.runtime.system import fault_points
from shoal.runtime.system.threads import in_threads

Value = TypeVar("Value")

_LEASES = 5  # SHOAL_SAVE_LEASE_S that a save may go without a beat: a request may take minutes
_BEAT_S = 30.0  # an object may be written about once a second, and each request costs something
_LOOK_S = 1.0
_GAP_BYTES = 1 << 20  # a request costs about as much as reading this
_REQUEST_BYTES = 8 << 20
_REQUESTS = 12  # reads at a time, of all processes of a host
_SMALL_REQUESTS = 16  # for small files
_PAGE = 1000  # names in an answer to a listing, or a multiple
_EMPTY_BYTES = 500  # a COMMIT that says that something is committed is longer
_CONDITIONS = "CONDITIONS"
_UNREADABLE = (CorruptCheckpointError, UnsupportedCheckpointError)


class Access:
    """How a bucket is used: the same for all places below one address."""

    def __init__(
        self, root: Objects, is_single_writer: bool = False, processes_here: int = 1
    ) -> None:
        """`processes_here`: of the job, on this host."""
        self.root, self.is_single_writer = root, is_single_writer
        self.reads = max(1, _REQUESTS // processes_here)
        self._lock, self.is_checked = threading.Lock(), is_single_writer

    def check(self, left: Left) -> None:
        """Check once that the server keeps the conditions of writes.

        The verdict stays beside the run, for later programs.

        Raises:
          StorageError: it does not, or cannot be asked.
        """
        root = self.root.limited(left)
        with self._lock:
            if not self.is_checked and not self._was_checked(root):
                try:
                    check_conditions(root)
                except StorageError as error:
                    hint = f"`shoal doctor --shared {self.root.url}` tries everything"
                    error.args = (f"{error}\n{hint}",)
                    raise
                record = {**self._server, "conditions": "kept", "time": time.time()}
                with contextlib.suppress(StorageError):  # the next program checks again
                    root.put(_CONDITIONS, json.dumps(record).encode())
            self.is_checked = True

    def _was_checked(self, root: Objects) -> bool:
        with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):
            record = json.loads(root.read(_CONDITIONS)[0])
            return bool(record.items() >= self._server.items())  # it was not copied from elsewhere
        return False

    def check_emptiness(self, left: Left) -> None:
        """Check that what lists nothing is a bucket.

        A page of HTML looks like an empty listing: it also answers where an object, or none, does.

        Raises:
          StorageError: it is not, or cannot be asked.
        """
        root = self.root.limited(left)

        def is_foreign() -> bool:
            try:
                return b'"conditions"' not in root.read(_CONDITIONS)[0]
            except FileNotFoundError:
                return False

        if is_foreign() and is_foreign():
            raise StorageError(
                f"{root.url}: the server lists nothing, and returns contents for the object "
                f"{_CONDITIONS} that shoal has not written: a proxy may answer in place of the "
                "bucket\ncheck the endpoint and the network",
                path=root.url,
            )

    @property
    def _server(self) -> dict[str, str]:
        return {"url": self.root.url, "server": self.root.server}


class ObjectStore:
    """See `store.interface.Store`."""

    def __init__(
        self,
        objects: Objects,
        access: Access | None = None,
        left: Left = lambda: math.inf,
        *,
        is_listed: bool = False,
    ) -> None:
        """`is_listed`: a listing shows a COMMIT here."""
        self._objects, self._access, self._left = objects, access or Access(objects), left
        self._is_listed = is_listed

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def __str__(self) -> str:
        return self.path

    # ---- where

    @property
    def path(self) -> str:
        """See `Store.path`."""
        return self._objects.url

    def step(self, step: int) -> Store:
        """See `Store.step`."""
        return self._step(step, is_listed=False)

    def _step(self, step: int, *, is_listed: bool) -> Store:
        there = self._objects.below(step_name(step))
        return ObjectStore(there, self._access, self._left, is_listed=is_listed)

    def steps(self, first: int = 0) -> list[tuple[int, Store]]:
        """See `Store.steps`."""
        return [(step, store) for step, store, _ in self._listed(first)]

    def unsettled(self) -> list[tuple[int, Store]]:
        """See `Store.unsettled`. One listing and a register of each step show it."""
        unsettled_steps: list[tuple[int, Store]] = []

        def look(own: Iterator[tuple[int, Store, list[str]]]) -> None:
            for step, store, names in own:
                if not _is_settled(store, names):
                    unsettled_steps.append((step, store))

        in_threads(look, self._listed(), _SMALL_REQUESTS)
        return sorted(unsettled_steps)

    def _listed(self, first: int = 0) -> list[tuple[int, Store, list[str]]]:
        """Return the steps from `first` on, in order, with the names of their files.

        Where only an empty register is left, the step is deleted. Its size says so: the registers
        of deleted steps stay for good, and need not all be read.
        """
        steps: list[tuple[int, Store, list[str]]] = []
        # SeaweedFS leaves out the folder whose name is the offset: begin at the step before.
        begin = step_name(first - 1) if first > 0 else ""
        listed = self._surely(
            lambda: self._objects.listed_below(STEPS, begin),
            lambda folders: sum(map(len, folders.values())),
        )
        for name, infos in listed.items():
            own = [info for info in infos if info.name != _CONDITIONS]
            step = step_of(name)
            if step is None or step < first or all(map(_is_empty_register, own)):
                continue
            names = [info.name for info in own]
            store = self._step(step, is_listed=COMMIT in names)
            if names != [COMMIT] or _may_hold_one(store):
                steps.append((step, store, names))
        return sorted(steps)

    def _surely(self, look: Callable[[], Value], count: Callable[[Value], int]) -> Value:
        """Return a listing; it is made again if an answer that is none could have ended it.

        Such an answer looks like one without names: like nothing at all, or like the end after
        whole pages.

        Raises:
          StorageError: what lists nothing is no bucket.
        """
        listing = look()
        if count(listing) % _PAGE == 0:
            listing = look()
            if not count(listing):
                self._access.check_emptiness(self._left)
        return listing

    def _contents(self) -> PrefixContents:
        return self._surely(
            self._objects.listed, lambda contents: len(contents.infos) + len(contents.folders)
        )

    def names(self) -> list[str]:
        """See `Store.names`."""
        contents = self._contents()
        names = [info.name for info in contents.infos if not _is_empty_register(info)]
        return sorted(name for name in [*names, *contents.folders] if name != _CONDITIONS)

    def why_absent(self, name: str = "") -> str:
        """See `Store.why_absent`."""
        return ""

    @property
    def is_link(self) -> bool:
        """See `Store.is_link`."""
        return False

    @property
    def pace(self) -> Pace:
        """See `Store.pace`."""
        return Pace(
            lease_s=_LEASES * settings.seconds("SHOAL_SAVE_LEASE_S"),
            beat_s=_BEAT_S,
            look_s=_LOOK_S,
            sizes_first=False,
            writes_whole=True,
            gap_bytes=_GAP_BYTES,
            request_bytes=_REQUEST_BYTES,
            reads=self._access.reads,
            looks=_SMALL_REQUESTS,
        )

    def limited(self, left: Left) -> Store:
        """See `Store.limited`."""
        there = self._objects.limited(left)
        return ObjectStore(there, self._access, left, is_listed=self._is_listed)

    # ---- files

    def size(self, name: str) -> int:
        """See `Store.size`."""
        return confirmed(lambda: self._objects.info(name)).bytes

    def read(self, name: str, most_bytes: int = 1 << 31) -> bytes:
        """See `Store.read`."""
        return self._objects.read(name)[0]

    def read_at(self, name: str, offset: int, parts: Sequence[memoryview]) -> Got:
        """See `Store.read_at`."""
        part = self._objects.read_at(name, offset, parts)
        return Got(part.num_bytes, part.size)

    def leave(self, name: str) -> None:
        """See `Store.leave`."""
        self._objects.put(name, b"")

    def remove(self, name: str) -> None:
        """See `Store.remove`."""
        self._objects.remove([name])

    # ---- one save

    def check_writable(self) -> int | None:
        """See `Store.check_writable`."""
        return None

    def begin(self, manifest: Manifest, owner: Mapping[str, Any]) -> None:
        """See `Store.begin`."""
        attempt = manifest.attempt
        self._access.check(self._left)
        current = register.read(self._objects).register
        self._check_open(current, attempt, "begin", owner.get("replaces", ""))
        self._put_owner(attempt, owner)
        self._objects.put(manifest_name(attempt), encode_manifest(manifest))

    def _check_open(self, current: Register, attempt: str, phase: str, replaced: str) -> None:
        if current.commit is not None and current.commit.attempt not in (attempt, replaced):
            raise already_committed(self.path, current.commit, replaced)
        if attempt in current.ended:
            raise ended_error(self.path, attempt, phase)

    def is_open(self, attempt: str) -> bool:
        """See `Store.is_open`. That the register still permits it is checked by the commit."""
        try:
            self.size(pending_name(attempt))
        except FileNotFoundError:
            return False
        return True

    def refresh(self, attempt: str) -> None:
        """See `Store.refresh`."""
        owner = self._owner(attempt)
        if owner:  # else committed or ended by now
            self._put_owner(attempt, owner)

    def _put_owner(self, attempt: str, owner: Mapping[str, Any]) -> None:
        data = json.dumps(dict(owner), sort_keys=True).encode()
        self._objects.put(pending_name(attempt), data)

    def open_new(self, name: str, num_bytes: int) -> OpenFile:
        """See `Store.open_new`."""
        return self._objects.open_new(name, num_bytes)

    def write_part(self, part: Part) -> None:
        """See `Store.write_part`."""
        self._objects.put(part_name(part.attempt, part.process), encode_part(part))

    def missing_parts(self, attempt: str) -> list[int]:
        """See `Store.missing_parts`."""
        missing: list[int] = []

        def look(processes: Iterator[int]) -> None:
            for process in processes:
                try:
                    self.size(part_name(attempt, process))
                except FileNotFoundError:
                    missing.append(process)

        in_threads(look, range(self._manifest(attempt).num_processes), _SMALL_REQUESTS)
        return sorted(missing)

    def _manifest(self, attempt: str) -> Manifest:
        name = manifest_name(attempt)
        with located(self.path):
            return confirmed(lambda: decode_manifest(self.read(name), name))

    def commit(self, attempt: str, replaced: str = "") -> Commit:
        """See `Store.commit`."""
        fault_points.reach("save.assemble", None)
        current = register.read(self._objects).register
        if attempt in current.ended:
            self._remove_attempt(attempt)  # including files written after its end
        self._check_open(current, attempt, "commit", replaced)
        if current.commit is None or current.commit.attempt == replaced:
            current = self._join_and_commit(attempt, replaced)
        if current.commit is None:
            raise ended_error(self.path, attempt, "commit")
        fault_points.reach("save.committed", None)
        with contextlib.suppress(CheckpointError, OSError):  # it is saved; a later call tidies
            self._tidy(current)
            fault_points.reach("save.tidied", None)
        return current.commit

    def _owner(self, attempt: str) -> Mapping[str, Any] | None:
        """Return what PENDING says; None if there is none, or it cannot be read."""
        name = pending_name(attempt)

        def look() -> Mapping[str, Any]:
            with contextlib.suppress(ValueError):
                owner = json.loads(self.read(name))
                if isinstance(owner, dict):
                    return owner
            raise CorruptCheckpointError(f"{name} is not a JSON object", file=name)

        with contextlib.suppress(FileNotFoundError, *_UNREADABLE):
            return confirmed(look)
        return None

    def _join_and_commit(self, attempt: str, replaced: str) -> Register:
        try:
            joined = confirmed(lambda: self._joined(attempt))
        except (FileNotFoundError, SaveAbortedError, *_UNREADABLE) as error:
            # Other processes may commit, tidy or end it concurrently; the current state counts.
            current = register.read(self._objects).register
            self._check_open(current, attempt, "commit", replaced)
            if current.commit is not None and current.commit.attempt == attempt:
                return current
            if not isinstance(error, FileNotFoundError):
                raise
            missing = None
            with contextlib.suppress(FileNotFoundError, *_UNREADABLE):
                missing = self.missing_parts(attempt)
            raise incomplete_error(self.path, attempt, missing) from error
        return self._change(register.committing(self.path, joined, replaced))

    def _joined(self, attempt: str) -> Commit:
        """Write the index of an attempt, and return what COMMIT is to say."""
        manifest, manifest_blob, index = assemble(self, attempt, _SMALL_REQUESTS)
        name, data = index_name(attempt), encode_index(index)
        self._objects.put(name, data)  # equal bytes, whichever process writes them
        fault_points.reach("save.indexed", None)
        fault_points.reach("save.link", None)
        commit = commit_of(manifest, manifest_blob, index, blob_record(name, data))
        for blob in (commit.manifest, commit.index):  # an answer to a read or write may be wrong
            read_blob(self, blob)
        return commit

    def _change(self, act: Change) -> Register:
        # A run that was saved with a single writer says so itself.
        if not (self._access.is_checked or register.read(self._objects).register.is_single_writer):
            self._access.check(self._left)
        return register.change(
            self._objects, act,
            timeout_s=min(settings.seconds("SHOAL_TIMEOUT_S"), self._left()),
            is_single_writer=self._access.is_single_writer,
        )  # fmt: skip

    def is_standing(self, attempt: str) -> bool:
        """See `Store.is_standing`."""
        with contextlib.suppress(CheckpointError, OSError):
            standing = self.standing()
            return standing is not None and standing.attempt == attempt
        return False

    def commit_despite(self, error: StorageError, attempt: str) -> Commit:
        """See `Store.commit_despite`. What was read from a bucket survives."""
        standing = self.standing()
        if standing is None or standing.attempt != attempt:  # deleted meanwhile
            raise error
        return standing

    def abandon(self, attempt: str) -> Commit | None:
        """See `Store.abandon`.

        Without conditions, an end that is written while another process commits would undo that
        commit. So with a single writer only the next run ends attempts.
        """
        if self._access.is_single_writer:
            standing = self.standing()
            if standing is None or standing.attempt != attempt:
                raise StorageError(
                    f"{self.path}: with single_writer=True, the next program that opens this "
                    "ends the attempt",
                    path=self.path,
                )
            return standing
        return self._end(attempt)

    def _end(self, attempt: str) -> Commit | None:
        current = self._change(register.ending(attempt))
        if current.commit is not None and current.commit.attempt == attempt:
            return current.commit
        self._remove_attempt(attempt)
        return None

    def _remove_attempt(self, attempt: str) -> None:
        """Remove the files of an attempt that can no longer be committed."""
        self._objects.remove(self._files().attempts.get(attempt, ()))

    def _files(self) -> Listing:
        infos = self._contents().infos
        return Listing.of(info.name for info in infos if info.name != _CONDITIONS)

    def _tidy(self, current: Register) -> None:
        """Remove what the register says is over: ended attempts, what a commit has left."""
        files = self._files().attempts
        names = [name for attempt in current.ended for name in files.get(attempt, ())]
        if current.commit is not None:
            names += _left_over(current.commit, files.get(current.commit.attempt, ()))
        self._objects.remove(names)

    # ---- upkeep

    def committed(self) -> Commit | None:
        """See `Store.committed`."""
        commit = self.standing()
        if commit is not None:
            check_place(self.path, commit.step, COMMIT)
        return commit

    def standing(self) -> Commit | None:
        """See `Store.standing`."""
        return self._register().commit

    def _register(self, *, is_listed: bool = False) -> Register:
        """Return the register.

        Raises:
          StorageError: there is none, and a listing shows one: it is never removed.
        """
        seen = register.read(self._objects)
        if seen.version is None and (is_listed or self._is_listed):
            raise StorageError(
                f"{self.path}: the bucket lists a {COMMIT} here, and says that there is none\n"
                "one of its answers is wrong: try again; if the objects of this step were removed "
                "by hand, remove all of them",
                path=self.path,
            )
        return seen.register

    def state(self) -> StoreState:
        """See `Store.state`."""
        infos = {info.name: info for info in self._contents().infos}
        # After the listing: it may be committed meanwhile.
        current = self._register(is_listed=COMMIT in infos)
        files = Listing.of(infos.keys() - {_CONDITIONS})
        own = current.commit.attempt if current.commit else ""
        now = self._now() if files.attempts.keys() - {own} else 0.0
        attempts = [
            self._look_at(attempt, names, infos, current, now)
            for attempt, names in files.attempts.items()
            if attempt != own
        ]
        if current.commit is not None:
            check_place(self.path, current.commit.step, COMMIT)
        return StoreState(
            current.commit, attempts, deleting=(), is_pinned=current.is_pinned, others=files.others
        )

    def _look_at(
        self,
        attempt: str,
        names: tuple[str, ...],
        infos: Mapping[str, ObjectInfo],
        current: Register,
        now: float,
    ) -> Attempt:
        pending = infos.get(pending_name(attempt))
        is_live, age_s = False, math.inf
        if pending is not None and attempt not in current.ended:
            is_live, age_s = True, now - pending.modified_s
        owner, is_complete = self._owner(attempt) or {}, False
        with contextlib.suppress(FileNotFoundError, *_UNREADABLE):
            parts = [part_name(attempt, p) for p in range(self._manifest(attempt).num_processes)]
            is_complete = infos.keys() >= {*parts}
        ahead_s = max(0.0, -age_s)
        return Attempt(
            id=attempt,
            is_live=is_live,
            is_complete=is_complete,
            idle_s=max(0.0, age_s),
            owner=owner,
            names=names,
            ahead_s=ahead_s,
        )

    def _now(self) -> float:
        """Return the time by the bucket's clock, which stamps objects."""
        name = temporary_name(new_attempt())
        try:
            self._objects.put(name, b"")
        except StorageError:  # this process may only read
            return time.time()
        try:
            return _info_of_written(self._objects, name).modified_s
        finally:
            with contextlib.suppress(StorageError):  # it may not delete
                self._objects.remove([name])

    def recover(self) -> Commit | None:
        """See `Store.recover`."""
        self._tidy(self._register())
        state = self.state()
        attempts = [
            attempt
            for attempt in state.attempts
            if attempt.is_live and attempt.is_complete
            and (state.commit is None or attempt.owner.get("replaces") == state.commit.attempt)
        ]  # fmt: skip
        for attempt in sorted(attempts, key=lambda attempt: (attempt.is_ahead, attempt.idle_s)):
            # One that cannot be committed is left to `collect_garbage`; the next may succeed.
            with contextlib.suppress(SaveAbortedError, *_UNREADABLE):
                try:
                    return self.commit(attempt.id, attempt.owner.get("replaces", ""))
                except StepAlreadyCommittedError:
                    break
        return self.committed()

    def collect_garbage(self, *, idle_s: float) -> list[str]:
        """See `Store.collect_garbage`."""
        self.recover()
        removed: list[str] = []
        for attempt in self.state().attempts:
            # Without PENDING it has been idle for ever.
            if attempt.idle_s >= idle_s and self._end(attempt.id) is None:
                removed += attempt.names
        return removed

    def delete(self, attempt: str) -> bool:
        """See `Store.delete`."""
        current = self._change(register.deleting(attempt))
        if current.commit is not None and current.commit.attempt == attempt:  # pinned
            return False
        if attempt in current.ended:
            fault_points.reach("delete.marked", None)
            self._remove_attempt(attempt)
        return True

    def delete_damaged(self) -> bool:
        """See `Store.delete_damaged`."""
        try:
            standing = self.standing()
        except CorruptCheckpointError:
            self._delete_unreadable()
            return True
        return standing is None or self.delete(standing.attempt)

    def _delete_unreadable(self) -> None:
        """Write the register anew, if it is still unreadable: all attempts here are ended."""
        try:
            content, version = self._objects.read(COMMIT)
            decode_register(content)
        except FileNotFoundError:
            return
        except CorruptCheckpointError:
            pass
        else:  # another process did it, and perhaps something is saved by now
            return
        gone = tuple(self._files().attempts)
        data = encode_register(Register(ended=gone, nonce=secrets.token_hex(8)))
        with contextlib.suppress(FileExistsError):  # another process did it
            if self._access.is_single_writer:
                self._objects.put(COMMIT, data)
            else:
                self._objects.put_over(COMMIT, data, version)
        self._tidy(register.read(self._objects).register)

    @property
    def is_pinned(self) -> bool:
        """See `Store.is_pinned`."""
        with contextlib.suppress(*_UNREADABLE):
            return self._register().is_pinned
        return False

    def pin(self) -> bool:
        """See `Store.pin`."""
        return self._change(register.pinning).commit is not None

    def unpin(self) -> None:
        """See `Store.unpin`."""
        self._change(register.unpinning)


def _is_empty_register(info: ObjectInfo) -> bool:
    """Is this a COMMIT that says that nothing is saved?"""
    return info.name == COMMIT and info.bytes < _EMPTY_BYTES


def _is_settled(store: Store, names: Sequence[str]) -> bool:
    """Is a step committed, and are these the files that it needs, and no others?"""
    with contextlib.suppress(CheckpointError):
        commit = store.committed()
        if commit is not None:
            own, data = (COMMIT, commit.manifest.name, commit.index.name), f"data-{commit.attempt}-"
            return all(name in own or name.startswith(data) for name in names)
    return False


def _may_hold_one(store: Store) -> bool:
    """Does the register, of which alone is left, say that something is committed?"""
    try:
        return store.standing() is not None
    except _UNREADABLE:
        return True


def check_conditions(objects: Objects) -> None:
    """Refuse a server that ignores the conditions of writes: two saves of a step would both commit.

    Raises:
      StorageError: it overwrites what exists, or what has changed.
    """
    name = temporary_name(new_attempt())
    try:
        if not _writes(objects.put_new, name, b"first"):  # a conflict that is none
            objects.put(name, b"first")
        stale = _info_of_written(objects, name).version
        is_kept = not _writes(objects.put_new, name, b"second")
        objects.put(name, b"third")
        if not is_kept or _writes(objects.put_over, name, b"fourth", stale):
            condition = "If-Match" if is_kept else "If-None-Match"
            raise StorageError(
                f"{objects.url}: this server ignores the conditions of writes ({condition}), so of "
                "two saves of one step both would be committed\nsave to another server, or to a "
                "newer version of this one; if it is certain that one job at a time saves here: "
                "shoal.Bucket(url, single_writer=True)",
                path=objects.url,
            )
    finally:
        with contextlib.suppress(StorageError):  # this process may not delete
            objects.remove([name])


def _info_of_written(objects: Objects, name: str) -> ObjectInfo:
    try:
        return confirmed(lambda: objects.info(name))
    except FileNotFoundError:
        where = f"{objects.url}/{name}"
        raise StorageError(f"{where}: what was just written is not there", path=where) from None


def _writes(put: Callable[..., None], *arguments: object) -> bool:
    try:
        put(*arguments)
    except FileExistsError:
        return False
    return True


def _left_over(commit: Commit, names: Sequence[str]) -> list[str]:
    """Return the files that a committed attempt no longer needs."""
    keep = (commit.manifest.name, commit.index.name)
    return [name for name in names if name not in keep and not name.startswith("data-")]
