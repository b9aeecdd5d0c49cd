"""Run the saves of a history, one at a time, and apply retention after each commit."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal import settings
from shoal.arguments import as_number
from shoal.checkpoint.blocks.memory import Arena
from shoal.checkpoint.blocks.reader import DamagedPart, is_intact
from shoal.checkpoint.coordination.lead import run_on_lead
from shoal.checkpoint.history.resumable import Asked
from shoal.checkpoint.planning.policies import (
    Keep,
    Saved,
    metrics_ranked,
    not_ranked,
    unranked,
    wrong_kept,
)
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.interface import Store
from shoal.errors import (
    DeadlineError,
    StorageError,
    UsageError,
    raise_all,
)
from shoal.runtime.agreement import Call, agree
from shoal.runtime.client.group import Group
from shoal.runtime.client.interface import JobClient
from shoal.runtime.preemption import note_failed, note_kept, note_requested
from shoal.runtime.rules.point import Point
from shoal.runtime.rules.requested_saves import COMMITTED, FAILED
from shoal.runtime.rules.stopping import Notice
from shoal.runtime.system.callsite import callsite
from shoal.runtime.system.interrupts import interrupts_delivered

if TYPE_CHECKING:
    from shoal.checkpoint.format.records import Commit
    from shoal.checkpoint.saving.background import Saving
    from shoal.checkpoint.saving.state import State

_LOG = logging.getLogger("shoal")
_BLOCKED_S = 1.0  # log when a save waits this long for the previous one
_ENTRY_BYTES = 200  # of a header, without the name
_SPARE_BYTES = 1 << 20
_MANY = 10  # steps without a metric, of which `Best` deletes none
_LEAST_S = 1.0  # allowed to a save even if the notice leaves no time


class Rate(NamedTuple):
    """Throughput of the last save, from its call to its commit."""

    num_bytes: int
    took_s: float


class _Running(NamedTuple):
    step: int
    saving: Saving


def seconds_needed(num_bytes: int, rate: Rate) -> float:
    """Return the expected duration of a save.

    >>> seconds_needed(3000, Rate(1000, 2.0))
    6.0
    """
    return rate.took_s * num_bytes / max(1, rate.num_bytes)


class _NextSave:
    """The step at which the save after a running one begins: equal on all processes.

    Each process counts the steps that it has reached since the running save began; these are equal
    numbers for equal steps. Once the save is over on all processes, its thread sends the count and
    receives the largest of all. The next save begins one step later: no process has passed that
    one. Meanwhile a process that reaches another step waits, since its count is already sent.
    """

    def __init__(self, begins_at: int | None = None) -> None:
        self._lock = threading.Lock()
        self._reached = 0
        self._begins_at = begins_at  # by that count; None: not agreed
        self._is_agreeing = False

    def agree(self, await_all: Callable[[], object], largest: Callable[[int], int]) -> None:
        """Agree on the step, in the thread of the save that is over.

        If an argument raises, the next save begins at the next step of each process, and reports
        why.

        Args:
          await_all: waits until it is over on all processes, also `on_commit` on the first.
          largest: maps this process's count to the largest, in one round trip.
        """
        begins_at = 0
        try:
            await_all()
            with self._lock:
                self._is_agreeing, reached = True, self._reached
            begins_at = largest(reached) + 1
        finally:
            with self._lock:
                self._begins_at, self._is_agreeing = begins_at, False

    def is_here(self) -> bool | None:
        """Count a step; return whether the save begins there. None: wait for the thread first."""
        with self._lock:
            if self._is_agreeing:
                return None
            self._reached += 1
            return self._begins_at is not None and self._reached >= self._begins_at


class Saver:
    """Saves steps one after the other."""

    def __init__(
        self,
        client: JobClient,
        root: Store,
        keep: Keep | None,
        *,
        group: Group,
        asynchronous: bool,
        check_replicas: bool,
        lease_s: float,
        is_continuous: bool,
        on_commit: Callable[[int], object] | None,
    ) -> None:
        """Prepare; `is_continuous`: `is_free` is called at each step."""
        self._client, self._root, self._keep = client, root, keep
        self._group = group
        self._asynchronous, self._lease_s = asynchronous, lease_s
        self._check_replicas = check_replicas
        self._arena = Arena()
        self._reserving: threading.Thread | None = None
        self._running: _Running | None = None
        self._is_continuous = is_continuous
        self._next = _NextSave(0)  # after the save that began last in a thread
        self._turn = threading.Lock()  # threads that save share the arena
        self._late_error: Exception | None = None  # raised after the commit
        self._rate: Rate | None = None
        self._on_commit = on_commit
        self._thread_of_on_commit: int | None = None  # while that runs
        self._oldest = 0  # no step below it was there at the last retention
        self._is_unranked = False  # a warning has named a metric that a save lacks
        self._is_of_many = False  # a warning has counted the steps that lack it
        self.asked: Asked | None = None  # of `resume`
        self.on_failed: Callable[[int], object] = lambda step: None  # after a save was begun
        self.called = root.path  # the same on all processes, even if their paths differ
        self.damaged: dict[int, DamagedPart] = {}  # of steps that this run skipped when it resumed

    @interrupts_delivered
    def save(
        self,
        step: int,
        state: Any,
        *,
        user: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        timeout_s: float | None,
        number: float,
    ) -> None:
        """Start saving a step after the previous save; if synchronous, wait for the commit.

        Args:
          number: of its call among those of `preempted`.

        Raises: the previous save's error, once; any error up to the copy of the state.
        """
        with self._turn, self._client.call("save", "main", self._group.named):
            settings.timeout("save", timeout_s, "SHOAL_TIMEOUT_S")
            self._check_keep(step, metrics)
            if self._check_replicas:
                self._compare_replicas(step, state, timeout_s)
            self._save(step, state, user, metrics, timeout_s, number)

    def _save(
        self,
        step: int,
        state: Any,
        user: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        timeout_s: float | None,
        number: float,
    ) -> None:
        self._wait_for_the_last(step, timeout_s)
        replaces = self._make_room(step)
        timeout_s = self._in_time(step, state, timeout_s)
        began, site = time.monotonic(), callsite()

        def committed(num_bytes: int) -> None:
            note_kept(self._client, self._root.path, number)
            note_requested(self._client, step, COMMITTED)
            self._rate = Rate(num_bytes, time.monotonic() - began)
            self.damaged.pop(step, None)  # it is replaced
            self._retain(step, site)
            self._run_on_commit(step)

        from shoal.checkpoint.saving.save import save_request, write_tree

        place = self._root.step(step)
        request = save_request(place, step=step, user=user, metrics=metrics, timeout_s=timeout_s)
        check = partial(self._check_asked, step)
        request = request._replace(replaces=replaces, check=check)
        if self._asynchronous:
            from shoal.checkpoint.saving.background import start_save

            self._await_memory()
            following = _NextSave()

            def failed() -> None:
                # It counts as a failure of now, whenever that is, until it is raised.
                note_failed(self._client, self._root.path, math.inf)
                note_requested(self._client, step, FAILED)
                self._agree_on(following, site, timeout_s)

            def done(commit: Commit) -> None:
                committed(commit.data_bytes)
                error = self._agree_on(following, site, timeout_s)
                self._late_error = self._late_error or error

            saving = start_save(
                self._client, request, state, self._group.named,
                arena=self._arena, on_failed=failed, on_done=done,
            )  # fmt: skip
            self._running, self._next = _Running(step, saving), following
            if self._client.stop.notice() is None:
                return
        else:
            write_tree(self._client, request, state, self._group.named)
            committed(total_bytes(state))
        self.settle(None)

    def _check_keep(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Refuse metrics that `keep` cannot rank, and a policy that returns no steps.

        With an open notice the state comes first.
        """
        lines, saved_step = unranked(self._keep, metrics), Saved(step, time.time(), metrics or {})
        if self._client.stop.notice() is None:
            refused = [] if metrics is None else lines
            raise_all(f"save({step})", [*wrong_kept(self._keep, saved_step), *refused])
        if not_ranked([saved_step], self._keep):
            return  # it is kept
        if lines and not self._is_unranked and self._client.process == self._group.lead:
            self._is_unranked = True
            _LOG.warning("save(%d): %s; this step is not among the best", step, "; ".join(lines))

    def _compare_replicas(self, step: int, state: Any, timeout_s: float | None) -> None:
        """Raise on all processes if devices hold different bits of the state's arrays."""
        import jax

        from shoal.checkpoint.saving.state import read_state
        from shoal.collectives.arguments import deadline_of
        from shoal.collectives.check_replicas import compare_replicas
        from shoal.collectives.leaves import LeafSpec, leaf_of

        operation = f"save({step})"
        leaves = read_state(state, self._group.count, operation).leaves
        arrays = [leaf for leaf in leaves if isinstance(leaf.value, jax.Array)]
        results = [leaf_of(leaf.record.name, leaf.value) for leaf in arrays]
        raise_all(operation, [problem for problem in results if isinstance(problem, str)])
        specs = [spec for spec in results if isinstance(spec, LeafSpec)]
        call = Call("check_replicas", "save", callsite(), tuple(spec.line for spec in specs))
        deadline = deadline_of(operation, None, timeout_s, "main")
        values = [leaf.value for leaf in arrays]
        compare_replicas(
            self._client,
            call,
            leaves=specs,
            values=values,
            deadline=deadline,
            lane="main",
            group=self._group,
        )

    def _check_asked(self, step: int, state: State) -> None:
        """Refuse a state that could not be resumed; with an open notice the state comes first."""
        if self.asked is None:
            return
        try:
            self.asked.check(state, step)
        except Exception as error:  # of a target that is a function of the program's, too
            if self._client.stop.notice() is None:
                raise
            if self._client.process == self._group.lead:
                detail = "the job is preempted, so it saves a state that `resume` would refuse"
                problems = getattr(error, "problems", None) or [repr(error)]
                _LOG.warning("save(%d): %s: %s", step, detail, "; ".join(problems))

    @property
    def is_saving(self) -> bool:
        """Is a save still running?"""
        running = self._running  # another thread may settle it
        return running is not None and not running.saving.done

    def is_free(self) -> bool:
        """Count a step; return whether a save begins there since none runs: equal on all processes.

        It sends nothing. If the last save is ending, it waits until the thread of that has agreed
        with those of the other processes.
        """
        answer = self._next.is_here()
        if answer is None:
            self._await_end()
            answer = self._next.is_here()
        return bool(answer)

    @interrupts_delivered
    def _await_end(self) -> None:
        running = self._running
        if running is not None:
            with self._shown_to_wait(running):
                running.saving.await_end()

    def _agree_on(
        self, following: _NextSave, site: str, timeout_s: float | None
    ) -> Exception | None:
        """Agree on the step of the next save, in the thread of one that is over.

        Args:
          timeout_s: of the save.

        Returns:
          Why that failed.
        """
        if not self._is_continuous:
            return None

        def meet(what: str, brought: bytes) -> Mapping[int, bytes]:
            return agree(
                self._client, Call("save", "save", site, (what,)), brought,
                timeout_s=settings.timeout("save", timeout_s, "SHOAL_TIMEOUT_S"),
                group=self._group.named, lane=f"next save {self.called}",
            )  # fmt: skip

        def largest(reached: int) -> int:
            return max(map(int, meet("the next save", b"%d" % reached).values()))

        try:
            following.agree(lambda: meet("the end of the save", b""), largest)
        except Exception as error:  # noqa: BLE001 - raised by the next save
            return error
        return None

    @interrupts_delivered
    def settle(self, timeout_s: float | None) -> None:
        """Wait for the running save, if any; raise its error, once.

        Meanwhile this process counts as waiting: it is not ended for the loss of a peer, because
        the save may still be committed.
        """
        if timeout_s is not None and as_number(timeout_s) != 0:  # 0 is valid here: it polls
            settings.timeout("wait", timeout_s, "")
        running = self._running
        if running is not None:
            try:
                with self._shown_to_wait(running):
                    running.saving.wait(timeout_s)
            except DeadlineError:
                raise  # of this wait: the next one waits again, or raises the save's own error
            except Exception:
                if not running.saving.done:
                    raise  # from a signal handler, during the wait: the save continues
                self._forget(running)
                self.on_failed(running.step)
                now = self._client.stop.number_of(None)
                note_failed(self._client, self._root.path, now)
                raise
            self._forget(running)
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def settle_step(self, step: int | None, timeout_s: float | None) -> None:
        """Like `settle`, if the running save is of this step; None: of any. All processes call it.

        A save that is over is settled, too: whether it is may differ between processes.
        """
        running = self._running
        if running is not None and step in (None, running.step):
            self.settle(timeout_s)

    @interrupts_delivered
    def await_step(self, step: int | None) -> None:
        """Wait as `settle_step`, on one process alone, for as long as the save's deadlines allow.

        Its error is raised, and kept for the next collective call, which raises it on all
        processes: one that did not raise it would be out of step.
        """
        running = self._running
        if running is None or step not in (None, running.step):
            return
        if running.saving.is_of_fork_parent:
            return  # what the folder says must do
        if self._is_in_on_commit:
            return  # it is committed
        is_main = threading.current_thread() is threading.main_thread()
        with self._shown_to_wait(running) if is_main else contextlib.nullcontext():
            running.saving.wait(keep_error=True)

    @contextlib.contextmanager
    def _shown_to_wait(self, running: _Running) -> Iterator[None]:
        progress = self._client.progress
        point = Point(f"the end of the save of step {running.step}", site=callsite())
        progress.begin_wait(point, time.monotonic())
        try:
            yield
        finally:
            progress.end_wait(point)

    def _forget(self, over: _Running) -> None:
        if self._running is over:  # otherwise another thread already saves
            self._running = None

    def reserve_for(self, state: Any) -> None:
        """Reserve the memory for copies of such a state, in a thread."""
        if not self._asynchronous or "jax" not in sys.modules:
            return  # nothing is copied, or nothing will be saved
        try:
            arguments = (planned_bytes(self._group, state),)
        except UsageError:  # parts of it cannot be saved: `save` reports that
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

    def _make_room(self, step: int) -> str:
        """Make room for a step that the run skipped as damaged, and that is now saved again.

        Returns the attempt that is to be replaced; "": nothing is saved there now.
        """
        if step not in self.damaged:
            return ""
        replaced = str(run_on_lead(
            self._client, "delete", (f"step={step}",),
            lambda: _room_for(self._root, step, self.damaged[step]),
            group=self._group, timeout_s=settings.seconds("SHOAL_TIMEOUT_S"),
        ))  # fmt: skip
        if not replaced:
            del self.damaged[step]
        _LOG.warning("save(%d): that step was damaged, and is replaced", step)
        return replaced

    def _in_time(self, step: int, state: Any, timeout_s: float | None) -> float | None:
        """Return the deadline of a save; warn if it cannot be met before the job is terminated."""
        notice = self._client.stop.notice()
        if notice is None or notice.deadline_s is None:
            return timeout_s
        if self._rate is not None and self._client.process == self._group.lead:
            needed_s = seconds_needed(total_bytes(state), self._rate)
            if needed_s > notice.deadline_s:
                _LOG.warning("%s", _too_late(step, needed_s, notice))
        left_s = max(notice.deadline_s, _LEAST_S)
        return left_s if timeout_s is None else min(timeout_s, left_s)

    def _retain(self, step: int, site: str) -> None:
        """Apply retention after the commit: the lead deletes, and all learn the result."""
        keep, lead = self._keep, self._group.lead
        if keep is None:
            return

        def act() -> list[int]:
            done = saved_steps.retain(
                self._root, keep, saved=step, idle_s=self._lease_s, process=lead,
                damaged=self.damaged, first=min(self._oldest, step),
            )  # fmt: skip
            self._oldest = done.oldest
            self._warn_of_many(step, len(not_ranked(done.judged, keep)))
            return done.deleted

        path, limit_s = self.called, settings.seconds("SHOAL_TIMEOUT_S")
        try:
            gone = run_on_lead(
                self._client, "save", ("retention",), act, group=self._group,
                timeout_s=limit_s, name="save", site=site, lane=f"save retention {path}",
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - the save has succeeded, whatever it is
            _LOG.warning("step %d is saved; deleting old steps failed: %s", step, error)
            self._late_error = error
        else:
            if gone and self._client.process == self._group.lead:
                _LOG.info("step %d is saved; deleted: %s", step, ", ".join(map(str, gone)))

    def _run_on_commit(self, step: int) -> None:
        """Call the function of the user's own on the lead; the save has succeeded all the same."""
        if self._on_commit is None or self._client.process != self._group.lead:
            return
        self._thread_of_on_commit = threading.get_ident()
        try:
            self._on_commit(step)
        except BaseException as error:
            # In a thread, `sys.exit` is a failure of the function, not the end of the program.
            if not (self._asynchronous or isinstance(error, Exception)):
                raise
            _LOG.warning("step %d is saved; on_commit raised: %r", step, error, exc_info=True)
        finally:
            self._thread_of_on_commit = None

    @property
    def _is_in_on_commit(self) -> bool:
        """Whether the user's function makes this call. The save is over only when that returns."""
        return self._thread_of_on_commit == threading.get_ident()

    def refuse_in_on_commit(self, operation: str) -> None:
        """Refuse a call that waits for the save, or for other processes, in the user's function.

        Raises:
          UsageError: it is made there.
        """
        if self._is_in_on_commit:
            raise UsageError(
                f"{operation} in on_commit=, which process {self._group.lead} calls alone, and for "
                "which the save waits: of these checkpoints, call pin, info and the listings there"
            )

    def _warn_of_many(self, step: int, count: int) -> None:
        """Warn, once, of many steps that only wait to be ranked."""
        if count > _MANY and not self._is_of_many:
            self._is_of_many = True
            names = " or ".join(map(repr, sorted(metrics_ranked(self._keep))))
            _LOG.warning(
                "step %d is saved: keep= has only Best(…), which never deletes a step without %s; "
                "there are %d; to delete old ones, write keep=Best(…) | Last(3)",
                step, names, count,
            )  # fmt: skip


def _room_for(root: Store, step: int, piece: DamagedPart) -> str:
    """Make room for a damaged step, if it is still damaged. See `saved_steps.make_room`.

    Raises:
      StorageError: it is not.
    """
    if is_intact(root.step(step), piece):
        raise StorageError(
            f"save({step}): this run skipped step {step}, since {piece.file} was damaged; it is "
            f"intact now: the storage answered wrongly before, and nothing was deleted\n"
            f"run the program again: `resume` returns that step; or call `delete({step})` first",
            path=root.path,
        )
    return saved_steps.make_room(root, step)


def total_bytes(state: Any) -> int:
    """Return the total size of a tree's arrays, over all processes."""
    from shoal.checkpoint.tree import flatten
    from shoal.checkpoint.tree.jax_nodes import JaxNodes

    return sum(
        int(getattr(leaf, "nbytes", 0)) for _, leaf in flatten.flatten_tree(state, JaxNodes())[0]
    )


def planned_bytes(group: Group, state: Any) -> int:
    """Estimate the memory of this process's files, rather too high than too low."""
    import jax

    from shoal.checkpoint.saving.state import among, own_of, read_state

    read = read_state(state, group.count, "resume")
    holder = group.process
    if read.is_spread and group.count > 1:
        holder = jax.process_index()
    if not group.is_all:  # assume that JAX numbers them alike: this is an estimate
        read, holder = among(read, group.members)[0], group.place
    own = own_of(read, holder, group.process, group.count)
    headers = sum(_ENTRY_BYTES + len(write.record.name) for write in own)
    return sum(write.num_bytes for write in own) + headers + _SPARE_BYTES


def _too_late(step: int, needed_s: float, notice: Notice) -> str:
    return (
        f"save({step}): at the rate of the last save it takes about {needed_s:.1f} s, and the "
        f"notice of process {notice.process} ({notice.source}: {notice.reason}) leaves "
        f"{notice.deadline_s:.1f} s: it may not finish in time. It is attempted nevertheless; "
        "earlier steps remain"
    )
