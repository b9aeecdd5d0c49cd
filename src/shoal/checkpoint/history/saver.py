"""The save that runs for a history, one at a time, and what follows its commit."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal import settings
from shoal.checkpoint.blocks.arena import Arena
from shoal.checkpoint.disk import saved_steps, step_names
from shoal.checkpoint.disk.storage import Folder
from shoal.checkpoint.format.records import Commit
from shoal.checkpoint.retention import Keep
from shoal.checkpoint.together.lead import lead_says
from shoal.errors import DeadlineError, UsageError
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import Coordinator
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.stopping import Notice
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.interrupts import interrupts_heard

if TYPE_CHECKING:
    from shoal.checkpoint.saving.background import Saving

_LOG = logging.getLogger("shoal")
_BLOCKED_S = 1.0  # a save that waits this long for the one before it says so
_ENTRY_BYTES = 200  # of a header, its name aside
_SPARE_BYTES = 1 << 20
_LEAST_S = 1.0  # what a save may take even if the notice says that no time is left


class Rate(NamedTuple):
    """How fast the last save was, from its call to its commit."""

    num_bytes: int
    took_s: float


class _Running(NamedTuple):
    step: int
    saving: Saving


def seconds_needed(num_bytes: int, rate: Rate) -> float:
    """Return how long a save is expected to take.

    >>> seconds_needed(3000, Rate(1000, 2.0))
    6.0
    """
    return rate.took_s * num_bytes / max(1, rate.num_bytes)


class Saver:
    """Saves steps one after the other."""

    def __init__(
        self,
        coordinator: Coordinator,
        root: Folder,
        keep: Keep | None,
        *,
        group: Group,
        asynchronous: bool,
        lease_s: float,
    ) -> None:
        self._coordinator, self._root, self._keep = coordinator, root, keep
        self._group = group
        self._asynchronous, self._lease_s = asynchronous, lease_s
        self._arena = Arena()
        self._reserving: threading.Thread | None = None
        self._running: _Running | None = None
        self._turn = threading.Lock()  # threads that save share the arena
        self._trouble: Exception | None = None  # of what followed the commit
        self._rate: Rate | None = None
        self.called = root.path  # the same on all processes, whatever each calls the folder
        self.damaged: set[int] = set()  # steps that this run passed over when it was resumed

    @interrupts_heard
    def save(
        self,
        step: int,
        state: Any,
        *,
        user: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        timeout_s: float | None,
    ) -> None:
        """Begin to save a step, after the one before; synchronously if that is asked for.

        Raises: what went wrong before, once; whatever goes wrong until the state is copied.
        """
        with self._turn, self._coordinator.call("save", "main", self._group.named):
            check_limit("save", timeout_s)
            self._save(step, state, user, metrics, timeout_s)

    def _save(
        self,
        step: int,
        state: Any,
        user: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        timeout_s: float | None,
    ) -> None:
        self._wait_for_the_last(step, timeout_s)
        self._make_room(step)
        timeout_s = self._in_time(step, state, timeout_s)
        began, site = time.monotonic(), callsite()

        def committed(commit: Commit) -> None:
            self._rate = Rate(commit.data_bytes, time.monotonic() - began)
            self._retain(step, site)

        path = self._root.folder(step_names.step_name(step)).path
        options: dict[str, Any] = {"step": step, "user": user, "metrics": metrics}
        options |= {"processes": self._group.named, "timeout_s": timeout_s}
        if self._asynchronous:
            from shoal.checkpoint.saving.background import start_save_with

            self._await_memory()
            saving = start_save_with(
                self._coordinator, path, state, arena=self._arena, on_done=committed, **options
            )
            self._running = _Running(step, saving)
            if self._coordinator.stop.notice() is None:
                return
        else:
            from shoal.checkpoint.saving.save import save_with

            save_with(self._coordinator, path, state, **options)
            self._rate = Rate(bytes_of(state), time.monotonic() - began)
            self._retain(step, site)
        self.settle(None)

    @property
    def is_saving(self) -> bool:
        """Does a save still run?"""
        running = self._running  # another thread may settle it
        return running is not None and not running.saving.done

    @interrupts_heard
    def settle(self, timeout_s: float | None) -> None:
        """Wait until nothing runs; raise, once, what went wrong.

        Meanwhile this process counts as one that waits: it is not ended for the loss of a peer,
        for the save may still be committed.
        """
        check_limit("wait", timeout_s)
        running = self._running
        if running is not None:
            progress = self._coordinator.progress
            point = Point(f"the end of the save of step {running.step}", site=callsite())
            progress.come(point, time.monotonic())
            try:
                running.saving.wait(timeout_s)
            except DeadlineError:
                raise  # it goes on; or has ended since, and says how when it is asked again
            except Exception:
                self._forget(running)
                raise
            finally:
                progress.go(point)
            self._forget(running)
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

    def _forget(self, over: _Running) -> None:
        if self._running is over:  # else another thread saves already
            self._running = None

    def reserve_for(self, state: Any) -> None:
        """Take the memory that copies of such a state need, in a thread."""
        if not self._asynchronous or "jax" not in sys.modules:
            return  # nothing is copied; nothing will be saved
        try:
            arguments = (planned_bytes(self._group, state),)
        except UsageError:  # not all of it can be saved: that is for `save` to say, if it is to be
            return
        self._await_memory()
        self._reserving = threading.Thread(
            target=self._arena.reserve, args=arguments, name="shoal arena", daemon=True
        )
        self._reserving.start()

    def _await_memory(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _wait_for_the_last(self, step: int, timeout_s: float | None) -> None:
        running, began = self._running, time.monotonic()
        self.settle(timeout_s)
        blocked_s = time.monotonic() - began
        if running is not None and blocked_s > _BLOCKED_S:
            _LOG.warning(
                "save(%d): blocked on the previous save, of step %d, for %.1f s",
                step,
                running.step,
                blocked_s,
            )

    def _make_room(self, step: int) -> None:
        """Delete the step that was damaged when the run passed over it, and is saved anew now."""
        if step not in self.damaged:
            return
        lead_says(
            self._coordinator, "delete", (f"step={step}",),
            lambda: saved_steps.make_room(self._root, step),
            group=self._group, timeout_s=settings.seconds("SHOAL_TIMEOUT_S"),
        )  # fmt: skip
        self.damaged.discard(step)
        _LOG.warning("save(%d): that step was damaged, and is replaced", step)

    def _in_time(self, step: int, state: Any, timeout_s: float | None) -> float | None:
        """Return the deadline of a save; say so if it cannot be done before the job is ended."""
        notice = self._coordinator.stop.notice()
        if notice is None or notice.deadline_s is None:
            return timeout_s
        if self._rate is not None and self._coordinator.process == self._group.lead:
            needed_s = seconds_needed(bytes_of(state), self._rate)
            if needed_s > notice.deadline_s:
                _LOG.warning("%s", _too_late(step, needed_s, notice))
        left_s = max(notice.deadline_s, _LEAST_S)
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _retain(self, step: int, site: str) -> None:
        """After the commit: the lead deletes what is not kept, and all hear how it went."""
        keep, lead = self._keep, self._group.lead
        if keep is None:
            return

        def act() -> list[int]:
            return saved_steps.retain(
                self._root, keep, saved=step, idle_s=self._lease_s, process=lead,
                damaged=self.damaged,
            )  # fmt: skip

        path, limit_s = self.called, settings.seconds("SHOAL_TIMEOUT_S")
        try:
            gone = lead_says(
                self._coordinator, "retain", (), act, group=self._group,
                timeout_s=limit_s, name=f"retain {path}", site=site, lane=f"retain {path}",
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - the save has succeeded, whatever it is
            _LOG.warning("step %d is saved; deleting old steps failed: %s", step, error)
            self._trouble = error
        else:
            if gone and self._coordinator.process == self._group.lead:
                _LOG.info("step %d is saved; deleted: %s", step, ", ".join(map(str, gone)))


def check_limit(asked: str, timeout_s: object) -> None:
    """Raise if that is no time to wait; 0 is: it asks whether a save is over."""
    if timeout_s is not None and not settings.timeout(asked, timeout_s, "") >= 0:
        raise UsageError(f"{asked}: timeout_s={timeout_s!r} must not be negative")


def bytes_of(state: Any) -> int:
    """Return how many bytes the arrays of a tree have, over all processes."""
    from shoal.checkpoint.tree import flatten
    from shoal.checkpoint.tree.jax_nodes import JaxNodes

    return sum(int(getattr(leaf, "nbytes", 0)) for _, leaf in flatten.flatten(state, JaxNodes())[0])


def planned_bytes(group: Group, state: Any) -> int:
    """Return about how much memory this process's files take, rather more than less."""
    import jax

    from shoal.checkpoint.planning import who_writes
    from shoal.checkpoint.saving.state import among, held_of, read_state

    read = read_state(state, group.count, "resume")
    number = jax.process_index() if read.is_spread and group.count > 1 else group.process
    if not group.is_all:  # as if they had the same numbers in JAX: this is an estimate
        read, number = among(read, group.members)[0], group.place
    own = who_writes.own_boxes(held_of(read, group.count), number)
    data = sum(who_writes.bytes_of(one.held.dtype, one.box.extent) for one in own)
    headers = sum(_ENTRY_BYTES + len(one.held.name) for one in own)
    return data + headers + sum(blob.size for blob in read.blobs.values()) + _SPARE_BYTES


def _too_late(step: int, needed_s: float, notice: Notice) -> str:
    return (
        f"save({step}): at the rate of the last save it takes about {needed_s:.1f} s, and the "
        f"notice of process {notice.process} ({notice.source}: {notice.reason}) leaves "
        f"{notice.deadline_s:.1f} s: it may not be finished. It is tried all the same; earlier "
        "steps stand"
    )
