"""The steps of a run: saved during training, kept by a policy, resumed after a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, cast

from shoal import settings
from shoal.arguments import check_flags, shown
from shoal.checkpoint.at import Path, store_at
from shoal.checkpoint.blocks.reader import DamagedPart
from shoal.checkpoint.bucket.address import Bucket
from shoal.checkpoint.coordination.lead import raise_together, run_on_lead
from shoal.checkpoint.coordination.one_folder import in_one_folder
from shoal.checkpoint.history.looking import ReadOnlyHistory, path_of_step
from shoal.checkpoint.history.resumable import (
    Asked,
    Leaves,
    check_resumable,
    compare_restored,
    made_by,
)
from shoal.checkpoint.history.saver import Saver
from shoal.checkpoint.planning.policies import (
    FREE,
    Cadence,
    Keep,
    policy_of,
    rule_text,
    rules_of,
)
from shoal.checkpoint.restoring.target import RestoreOptions, check_names
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.store.saved_steps import step_number
from shoal.checkpoint.store.step_names import COMMIT
from shoal.colour import collective, local
from shoal.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    NotSharedError,
    UsageError,
    UsageTypeError,
)
from shoal.names import hint_within
from shoal.runtime import process
from shoal.runtime.client.group import group_in
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope, fail_call, refused_for_all
from shoal.runtime.preemption import (
    failure_noted,
    is_requested,
    note_requested,
    save_noted,
    stops_at_save,
)
from shoal.runtime.rules.requested_saves import BY_STEPS, COMMITTED, EACH_CALL
from shoal.runtime.rules.stopping import REQUEUE
from shoal.tracebacks import at_caller

_LOG = logging.getLogger("shoal")


def _history_of(ckpts: Checkpoints, *_: object, **__: object) -> JobClient:
    ckpts._saver.refuse_in_on_commit("a collective call")  # before it counts as one
    return ckpts._client


def _members_of(ckpts: Checkpoints, *_: object, **__: object) -> tuple[int, ...] | None:
    return ckpts._group.named


def _given(*_: object, client: JobClient | None = None, **__: object) -> JobClient:
    return client or process.client()


def _fail_save(
    error: BaseException, ckpts: Checkpoints, step: object = None, *_: object, **options: object
) -> None:
    """Fail a refused save for the others, if these save that step."""
    if options.get("force") is True or ckpts._wants_all(step):
        fail_call(ckpts._client, "save", error, processes=ckpts._group.named)


def _fail_look(error: BaseException, ckpts: Checkpoints, *_: object, **__: object) -> None:
    """Fail a refused `should_save` for the others, if these are to read the lead's clock for it."""
    if ckpts._cadence.looks_next:
        fail_call(ckpts._client, "should_save", error, processes=ckpts._group.named)


@collective("processes")
class Checkpoints(ReadOnlyHistory):
    """The saved steps of a run, in one directory: `<path>/step_000000001000/`.

    Collective over processes.

    All processes construct it, and leave its `with` block, together. It cleans up after a crash: it
    commits a complete save attempt, ends one that was not refreshed for `lease_s`, and leaves alone
    one that is still being written. Steps are always listed from storage. A committed step is never
    overwritten, and `keep` never deletes the newest one.

    Args:
      path: the directory, or a bucket: a `Bucket`, or an address; the same for all processes.
      keep: which steps are kept: a number (that many of the newest), or policies of
        `shoal.retention`, such as `Last(2) | EverySteps(1000) | Best(1, "loss")`; None: all. Pinned
        steps are always kept.
      every: which steps `save` saves: a number of steps (5: steps 4, 9, 14, …), a
        `datetime.timedelta`, "free" (whenever no save runs), `EverySteps` or `EverySeconds` of
        `shoal.retention`, a function of the step that returns the same on all processes, or several
        joined by `|`; None: every step.
      on_commit: a function of a step and its path (as of `path_of`), which process 0 (of
        `processes`, the lowest) calls after each commit and the deletion of old steps, for example
        to upload the step. An exception that it raises is logged, and fails nothing. It runs in the
        thread that saved, and belongs to the save: the next `save`, `wait`, the end of the block
        and the exit of the program wait for it, and `keep` deletes no step meanwhile. If it takes
        longer than the deadline of the next save, that save fails; start a thread for such work. A
        save for a preemption notice also calls it, and returns after it. It must make no collective
        call; of these checkpoints it can call `pin`, `info` and the listings. It is not called for
        a step whose save another program completes after a crash.
      asynchronous: whether `save` returns once the state is copied, and a thread writes it.
      recover: whether to clean up after a crash. Pass False in programs that only read.
      check_replicas: whether `save` first compares the devices that hold the same shard, as
        `shoal.check_replicas` does; it saves nothing if they differ, also with a pending notice.
      lease_s: seconds after which a save attempt that was not refreshed is stale; a running save
        refreshes its own at least every 4 s, in a bucket every 30 s. None: SHOAL_SAVE_LEASE_S (60),
        in a bucket five times that.
      timeout_s: deadline of each call in seconds; None: each wait in it has a deadline of
        SHOAL_TIMEOUT_S (600).
      processes: the processes that share it, including the caller; "collective" here means over
        these. After a loss: `live_processes()`. None: all of the job.
      client: a job client, for tests; None: this process's.

    Raises:
      UsageError: on the caller: an argument is wrong. On all: the directory is a single checkpoint.
      DivergenceError: on all: the arguments differ.
      StorageError: on all: the leader cannot list the directory.

    Example:
      >>> import numpy as np, tempfile
      >>> with Checkpoints(tempfile.mkdtemp(), keep=2) as ckpts:
      ...     state, first = ckpts.resume(None, {"w": np.zeros(3)})
      ...     for step in range(first, 5):
      ...         state["w"] += 1.0
      ...         saved = ckpts.save(step, state)
      >>> ckpts.all_steps()
      (3, 4)
      >>> ckpts.restore()["w"]
      array([5., 5., 5.])
    """

    @collective_scope("Checkpoints", of=_given)
    def __init__(
        self,
        path: Path,
        *,
        keep: int | Keep | None = None,
        every: object = None,
        on_commit: Callable[[int, str | Bucket], object] | None = None,
        asynchronous: bool = True,
        recover: bool = True,
        check_replicas: bool = False,
        lease_s: float | None = None,
        timeout_s: float | None = None,
        processes: Iterable[int] | None = None,
        client: JobClient | None = None,
    ) -> None:
        self._client = client = client or process.client()
        self._root = store_at(path, f"Checkpoints: path={path!r}")
        self._bucket = path if isinstance(path, Bucket) else None
        self._timeout_s = timeout_s  # None: each wait has its own deadline
        flags: dict[str, object] = {
            "asynchronous": asynchronous, "recover": recover, "check_replicas": check_replicas
        }  # fmt: skip
        check_flags("Checkpoints", **flags)
        _check_seconds("Checkpoints", "timeout_s", timeout_s)
        _check_seconds("Checkpoints", "lease_s", lease_s)
        lease_s = self._root.pace.lease_s if lease_s is None else lease_s
        policy = policy_of(keep)
        is_continuous = FREE in (rules_of(every) or ())
        self._group = group_in(self._client, "Checkpoints", processes)
        self._saver = Saver(
            self._client, self._root, policy,
            group=self._group, asynchronous=asynchronous, check_replicas=check_replicas,
            lease_s=lease_s, is_continuous=is_continuous,
            on_commit=_with_path(on_commit, self._root, self._bucket),
        )  # fmt: skip
        self._is_closed = False

        options: dict[str, object] = {"keep": policy, "every": rule_text(every), **flags}
        begin = partial(saved_steps.open_history, self._root, idle_s=lease_s if recover else None)
        last, self._saver.called = in_one_folder(
            client, operation="Checkpoints", options=options, act=begin, store=self._root,
            group=self._group, timeout_s=self._limit_s("Checkpoints"), may_write=recover,
        )  # fmt: skip
        self._cadence = Cadence(
            every, self._clock_of_lead,
            is_free=self._saver.is_free, last=-1 if last is None else last,
        )  # fmt: skip
        self._saver.on_failed = self._cadence.undo
        self._pace = EACH_CALL if self._cadence.wants_every_step else BY_STEPS
        client.stop.saves.begin_history(self._pace, is_all=self._group.is_all)

    # ---- saving

    @collective("processes")
    @refused_for_all(_fail_look)
    def should_save(self, step: int) -> bool:
        """Return whether `every`, a notice or `shoal save` wants this step saved: equal on all.

        Collective over processes.

        A number of steps needs no communication. Seconds are measured by the leader's clock, which
        the processes query together at some of the steps. With "free", the processes agree on the
        step of the next save in the background, once a save has ended: the first step that no
        process has reached. A process that reaches a step meanwhile waits. From the agreed step of
        a pending preemption notice on (`shoal.preempted`) it is True, except for the step that was
        saved last: also if the loop calls `preempted` after this, in the same step. The command
        `shoal save` makes it True at one agreed step, until `save` has saved that.
        """
        try:
            number = step_number("should_save", step)
        except BaseException as error:
            _fail_look(error, self)
            raise
        wants, is_asked = self._cadence.wants(number), self._is_requested(number, "should_save")
        return wants or is_asked or self._stops_at(number, "should_save")

    @collective("processes")
    @refused_for_all(_fail_save)
    def save(
        self,
        step: int,
        state: Any,
        *,
        force: bool = False,
        user: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Save the state after a step, if `should_save` is True for it.

        Collective over processes.

        It waits for the previous save, agrees with all processes on what to save, copies the state,
        and returns; from then on the state may be modified or donated. After the commit, the steps
        that `keep` does not keep are deleted. An error after the copy is raised once, by the next
        call that saves (which then does not save) or waits, or at the end of the `with` block; a
        call that needs the step waits: `restore`, `resume`, `delete`, `pin`, `info`.

        With a pending notice (`shoal.preemption.notice`) it returns only when the step is committed
        or has failed, and the notice's deadline is its deadline. If the remaining time looks too
        short at the speed of the last save, it warns before it writes anything.

        Args:
          step: its number, 0 or greater; no step is ever overwritten.
          state: any tree of arrays and values, as for `shoal.save`.
          force: save regardless of `every`.
          user: JSON to store with it.
          metrics: numbers by name, for `Best`, whose names they must have.
          timeout_s: deadline of the whole save in seconds; None: that of these checkpoints.

        Returns:
          False if neither `every` nor a notice nor `shoal save` wants this step, else True.

        Raises:
          StepAlreadyCommittedError: on all: the step is saved already. Not if it is the step saved
            last, and that for `shoal save`, or where the program stops for a notice: a loop may
            save it again.
          RestoreMismatchError: on all: the next `resume`, called as the last one was, would refuse
            this state. Not with a pending notice: a warning says so.
          UsageError, DivergenceError, StorageError, SaveAbortedError, …: as `shoal.save`, on all.
          DivergenceError: also if replicas differ, with `check_replicas`.
        """
        self._saver.refuse_in_on_commit("save")
        with failure_noted(self._client, self._root.path, step) as number:
            try:
                step = step_number("save", step)
                check_flags("save", force=force)
                if self._is_closed:
                    raise UsageError(f"save: {self!r} is closed: its `with` block has ended")
            except BaseException as error:
                _fail_save(error, self, step, force=force)
                raise
            wants = force or self._cadence.wants(step)
            is_asked = self._is_requested(step, "save")
            if not (wants or is_asked or self._stops_at(step, "save")):
                return False
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            # A loop may save, ask, and save what it stops at again; `force` may save the last step.
            is_again = step == self._cadence.last
            with save_noted(self._client, step):
                if is_again and self._may_save_again(step):
                    self._saver.settle(limit_s)
                    note_requested(self._client, step, COMMITTED)
                    return True
                self._saver.save(
                    step, state, user=user, metrics=metrics, timeout_s=limit_s, number=number
                )
            self._cadence.begin(step)
            return True

    @collective("processes")
    def wait(self, *, timeout_s: float | None = None) -> None:
        """Wait until the running save, if any, is committed.

        Collective over processes.

        Raises:
          SaveAbortedError, StorageError, …: on all: it failed; each such error is raised once.
          DeadlineError: it still runs after `timeout_s`; it continues.
        """
        self._saver.refuse_in_on_commit("wait")
        self._saver.settle(timeout_s)

    # ---- restoring

    @collective("processes")
    @collective_scope("restore", of=_history_of, among=_members_of)
    def restore(
        self,
        step: int | None = None,
        target: Any = None,
        *,
        skip_corrupt: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[RestoreOptions],
    ) -> Any:
        """Restore a step, the same one on all processes: the leader chooses it.

        Collective over processes.

        It first waits, as `wait` does, for a running save of these checkpoints, if that is of this
        step.

        Args:
          step: None: the newest step, after any running save, also if another job deletes older
            ones meanwhile.
          target: as for `shoal.restore`: layouts, shapes, arrays, or None.
          skip_corrupt: skip damaged steps, with a warning: all processes restore the newest
            intact one. `save` replaces the skipped steps when it reaches them.
          timeout_s: deadline in seconds; None: that of these checkpoints.
          options: as for `shoal.restore`: only, rename, missing_ok, dtype, form, mode,
            max_host_bytes, merge.

        Raises:
          NotCommittedError: on all: nothing is saved, or not that step.
          SaveAbortedError, StorageError, …: on all: the save that it waited for failed; once, as
            `wait`.
          NotSharedError: on all: a process does not see what the leader sees.
          CorruptCheckpointError, RestoreMismatchError, …: as `shoal.restore`, on all.
        """
        restore = self._restoring(
            operation="restore", target=target, timeout_s=timeout_s, options=options, step=step
        )
        ask, damaged = partial(self._result_of_lead, "restore"), self._saver.damaged
        restored_step = restored(self._root, ask, restore, step, damaged, skip_corrupt=skip_corrupt)
        if restored_step is None:
            raise saved_steps.none_saved(self._root)
        return restored_step[1]

    @collective("processes")
    @collective_scope("resume", of=_history_of, among=_members_of)
    def resume(
        self,
        target: Any,
        init: Any,
        *,
        skip_corrupt: bool = False,
        check_init: bool = True,
        timeout_s: float | None = None,
        **options: Unpack[RestoreOptions],
    ) -> tuple[Any, int]:
        """Restore the newest step, or initialize: return the state and the next step.

        Collective over processes.

        It never returns a state that it could not return again: it checks here that the state, once
        it is saved, comes back as the same tree with the same target and options. Nor does it
        return one that `init` would not make: the arrays of a restored state have the names, shapes
        and dtypes of those that `init` makes. From then on `save` refuses a state that the next
        `resume` would refuse; with a pending notice it warns, and saves it.

        To compare a restored state, a function `init` is traced by `jax.eval_shape`, on all
        processes. There `put`, `create`, `from_host_local` and `relayout` return arrays without
        values. One that cannot be traced, since it reads values of arrays, or calls `restore`,
        `broadcast`, `barrier` or the like, is not compared, which is logged at DEBUG. Numbers,
        strings, `PerProcess` and None may become what they like, an `init` without arrays fits any
        state, and dtypes are compared as devices hold them. What `only` leaves out is not compared.

        It first waits for a running save of these checkpoints, as `restore` does. It also starts a
        thread that pre-faults the memory which `save` copies to.

        Args:
          target: layouts of a restored state, as for `restore`: None gives full NumPy arrays.
          init: the initial state if nothing is saved: a function without arguments
            (`lambda: shoal.create(…, layouts=layouts)`), or the state itself. It is used as is.
          check_init: False: do not compare what `init` makes with what is restored and saved: for
            an `init` that reads gigabytes, and for arrays that grow.
          skip_corrupt, timeout_s, options: as for `restore`.

        Returns:
          The state, and the step after the restored one; 0 if nothing was restored.

        Raises: as `restore`. NotCommittedError only with `skip_corrupt`, if steps are saved and all
          are damaged. RestoreMismatchError also if the state could not be restored again, or `init`
          makes another; UsageError if it cannot be saved. DivergenceError also if targets or
          options differ while nothing is saved.
        """
        from shoal.checkpoint.restoring.restore import restore_request

        check_flags("resume", check_init=check_init)
        restore = self._restoring("resume", target, timeout_s, options)
        request = restore_request("resume", self._root, target, options)
        damaged = self._saver.damaged

        def ask(spec: tuple[str, ...], act: Callable[[], Any]) -> Any:
            lines = (*spec, f"check_init={check_init}", *request.lines)
            return self._result_of_lead("resume", lines, act)

        step_and_state = restored(
            self._root,
            from_lead=ask,
            restore=restore,
            step=None,
            damaged=damaged,
            skip_corrupt=skip_corrupt,
        )
        is_new = step_and_state is None
        made: Leaves | None = None
        if step_and_state is None:  # `init` may itself be collective
            step_and_state = -1, init() if callable(init) else init
        elif check_init:
            made = made_by(init)
        step, state = step_and_state

        def check() -> None:
            nonlocal made
            leaves = check_resumable(state, request, processes=self._group.count, is_new=is_new)
            if is_new and check_init:
                made = leaves
            elif made is not None:
                where = f"step {step} of {self._root.path}"
                compare_restored(leaves, made, request.options, where)

        raise_together(
            self._client, "resume", check,
            group=self._group, timeout_s=self._limit_s("resume"),
        )  # fmt: skip
        self._saver.asked = Asked(request, made)
        self._saver.reserve_for(state)
        return state, step + 1

    # ---- tidying

    @local
    def pin(self, step: int) -> None:
        """Keep a step regardless of `keep`, until `unpin`. One process's call suffices.

        Local.

        It first waits for a running save of these checkpoints, if that is of this step.

        Raises:
          NotCommittedError: the step is not saved.
          SaveAbortedError, StorageError, …: the save that it waited for failed; the next collective
            call raises that again.
        """
        number = step_number("pin", step)
        self._saver.await_step(number)
        saved_steps.pin(self._root, number)

    @local
    def unpin(self, step: int) -> None:
        """Subject a step to `keep` again.

        Local.
        """
        saved_steps.unpin(self._root, step_number("unpin", step))

    @collective("processes")
    @collective_scope("delete", of=_history_of, among=_members_of)
    def delete(self, step: int) -> None:
        """Delete a step, damaged or not; if a crash interrupts it, the step is still deleted.

        Collective over processes.

        It first waits, as `wait` does, for a running save of these checkpoints, if that is of this
        step.

        Raises:
          NotCommittedError, UsageError: on all: it is not saved; it is pinned.
          SaveAbortedError, StorageError, …: on all: the save that it waited for failed; once, as
            `wait`.
        """
        number = step_number("delete", step)
        self._saver.settle_step(number, self._timeout_s)
        self._result_of_lead(
            "delete", (f"step={number}",), lambda: saved_steps.delete_step(self._root, number)
        )
        self._saver.damaged.pop(number, None)

    # ---- the block

    @collective("processes")
    def close(self) -> None:
        """Wait as `wait` does; nothing can be saved afterwards. Leaving the block calls this.

        Collective over processes.
        """
        self._saver.refuse_in_on_commit("close")
        if not self._is_closed:
            self._client.stop.saves.end_history(self._pace)
        self._is_closed = True
        self._saver.settle(None)

    def __enter__(self) -> Self:
        return self

    @at_caller
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as late:
            # Who reports success must not have lost a save; a fork (UsageError) has none to lose.
            is_success = isinstance(error, SystemExit) and error.code in (None, 0, REQUEUE)
            if error is None or (is_success and not isinstance(late, UsageError)):
                raise
            _LOG.warning("next to %s, which ended the block: %s", type(error).__name__, late)

    if not TYPE_CHECKING:  # to a type checker every name would be an attribute

        def __getattr__(self, name: str) -> NoReturn:
            problem = f"{type(self).__name__!r} object has no attribute {name!r}"
            hint = hint_within("Checkpoints", name)
            raise AttributeError("; ".join(filter(None, [problem, hint])), name=name, obj=self)

    def __repr__(self) -> str:
        return f"Checkpoints({self._root.path!r})"

    # ---- inside

    def _restoring(
        self,
        operation: str,
        target: Any,
        timeout_s: float | None,
        options: RestoreOptions,
        step: int | None = None,
    ) -> Callable[[int], Any]:
        """Return what restores a step, once a running save of `step` (None: of any) is over."""
        from shoal.checkpoint.restoring.restore import restore

        check_names(operation, options)
        _check_seconds(operation, "timeout_s", timeout_s)
        wanted = "a whole number, or None for the newest: write restore(step, target)"
        number = None if step is None else step_number(operation, step, wanted=wanted)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._saver.settle_step(number, limit_s)
        return lambda step: restore.on(
            self._client, cast(Any, self._root.step(step)), target,
            processes=self._group.named, timeout_s=limit_s, **options,
        )  # fmt: skip

    def _wants_all(self, step: object) -> bool:
        """Return whether `every` wants a step; of one that is no number: any."""
        try:
            return self._cadence.wants(step_number("save", step))
        except UsageError:
            return self._cadence.wants_every_step

    def _is_requested(self, step: int, operation: str) -> bool:
        """Return whether `shoal save` wants this step saved; each call counts."""
        caller = f"{operation}({step})"
        return step != self._cadence.last and is_requested(self._client, caller, step)

    def _stops_at(self, step: int, operation: str) -> bool:
        """Return whether a notice wants this step saved, though `every` does not."""
        caller = f"{operation}({step})"
        return step != self._cadence.last and stops_at_save(self._client, caller, step)

    def _may_save_again(self, step: int) -> bool:
        """Return whether the step saved last was saved for a request, or is one of a notice."""
        if self._client.stop.saves.has_served(step):
            return True
        return stops_at_save(self._client, f"save({step})", step)

    def _clock_of_lead(self, look: Callable[[], str]) -> str:
        return str(self._result_of_lead("should_save", (), look))

    def _result_of_lead(self, operation: str, spec: tuple[str, ...], act: Callable[[], Any]) -> Any:
        group, limit_s = self._group, self._limit_s(operation)
        return run_on_lead(self._client, operation, spec, act, group=group, timeout_s=limit_s)

    def _limit_s(self, operation: str) -> float:
        return settings.timeout(operation, self._timeout_s, "SHOAL_TIMEOUT_S")


def _check_seconds(operation: str, name: str, value: object) -> None:
    """Raise unless it is None or a positive number of seconds."""
    if value is not None:
        settings.timeout(operation, value, "", name)


def _with_path(
    on_commit: Callable[[int, str | Bucket], object] | None, root: Store, bucket: Bucket | None
) -> Callable[[int], object] | None:
    """Return the user's function as one of the step alone.

    Raises:
      UsageError: it is no function.
    """
    if on_commit is None:
        return None
    if not callable(on_commit):
        detail = f"must be a function of a step and its path, not {shown(on_commit)}"
        raise UsageTypeError(f"Checkpoints: on_commit {detail}")
    return lambda step: on_commit(step, path_of_step(root, bucket, step))


# ---- Restore the newest intact step: all processes skip a step that any of them finds damaged.


_SHOWN = 8


def restored(
    root: Store,
    from_lead: Callable[[tuple[str, ...], Callable[[], Any]], Any],
    restore: Callable[[int], Any],
    step: int | None,
    damaged: dict[int, DamagedPart],
    *,
    skip_corrupt: bool,
) -> tuple[int, Any] | None:
    """Restore a step, or with None the newest; return it and the result of `restore`.

    None if no step is saved. With `skip_corrupt`, a step with any damage, in COMMIT or in any byte
    read, is skipped: all processes warn, and take the one before. If the newest step is deleted
    while it is read, since another job has saved later ones, the newest of these is restored.

    Args:
      from_lead: as `result_of_lead`, from `spec` on.
      restore: restores a step; raises CorruptCheckpointError on all processes or on none.
      damaged: collects the skipped steps, and what was damaged; a step that is restored after all
        is removed from it.

    Raises:
      CorruptCheckpointError: on all: the step is damaged, and was named or `skip_corrupt` is False.
      UsageError: `step` is not a step number.
      NotCommittedError: on all: it is not saved; or steps are saved, and all are damaged.
    """
    check_flags("restore", skip_corrupt=skip_corrupt)
    if step is not None:
        number = saved_steps.step_number("restore", step)
        from_lead((f"step={number}",), lambda: saved_steps.require(root, number).step)
        value = restore(number)
        damaged.pop(number, None)
        return number, value
    passed: dict[int, DamagedPart] = {}
    gone: tuple[int, CheckpointError] | None = None
    while True:
        spec = ("step=None", f"skip_corrupt={skip_corrupt}", f"skipped: {sorted(passed)}")
        step, problems = from_lead(spec, partial(_look, root, skip_corrupt, [*passed]))
        if gone is not None and step in (gone[0], None):  # it stands, or nothing else does
            raise gone[1]
        faults = dict(problems)
        _warn(faults)
        passed |= dict.fromkeys(faults, DamagedPart(COMMIT, None))
        damaged |= passed
        if step is None and passed:
            raise none_intact(root, passed)
        if step is None:
            return None
        try:
            value = restore(step)
        except (
            NotCommittedError,
            NotSharedError,
        ) as error:  # deleted before all processes had opened it
            gone = step, error
        except CorruptCheckpointError as error:
            if not skip_corrupt:
                saved_steps.add_remedy(error)
                raise
            _warn({step: str(error)})
            passed[step] = damaged[step] = DamagedPart(error.file, error.offset)
        else:
            damaged.pop(step, None)
            return step, value


def _look(
    root: Store, skip_corrupt: bool, passed: Sequence[int]
) -> tuple[int | None, list[tuple[int, str]]]:
    """Return the newest step whose COMMIT is intact, and what is wrong with later ones."""
    faults: dict[int, str] = {}
    newest = saved_steps.newest(root, skip_corrupt=skip_corrupt, passed=passed, faults=faults)
    return None if newest is None else newest.step, list(faults.items())


def none_intact(root: Store, damaged: Collection[int]) -> NotCommittedError:
    """Return the error for a history of damaged steps alone: a run would begin anew beside them."""
    few = ", ".join(map(str, sorted(damaged)[-_SHOWN:]))
    are = "is damaged" if len(damaged) == 1 else "are damaged"
    detail = (
        f"no intact step is saved: {few} {are}\n"
        "repair their directories; for a new run delete them (`delete(step)`), or pass another path"
    )
    return NotCommittedError(f"{root.path}: {detail}", path=root.path)


def _warn(faults: Mapping[int, str]) -> None:
    for step, problem in faults.items():
        _LOG.warning("step %d is damaged, and skipped: %s", step, problem)
