"""The API of torch_xla's checkpoint manager."""

from __future__ import annotations

import os
from typing import Any

from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.tree.jax_nodes import JaxNodes
from shoal.colour import collective, local
from shoal.compat.arguments import flag, or_none, path_like, takes, whole
from shoal.compat.torch_xla.errors import (
    NoMeaningHere,
    SpmdError,
    UntrackedStep,
    stands_for,
)
from shoal.compat.torch_xla.sharded import XLAShardedTensor, values_of
from shoal.compat.torch_xla.tensors import fill, is_tensor
from shoal.compat.wording import errors_named
from shoal.errors import NotCommittedError, raise_all
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope, fail_call, refused_for_all
from shoal.runtime.preemption import preempted, reached

__all__ = ["CheckpointManager"]

_NODES = JaxNodes()


def _client_of(manager: CheckpointManager, *_: object, **__: object) -> JobClient:
    return manager._kept._client


def _fail_save(
    error: BaseException, manager: CheckpointManager, step: object = None, *_: object,
    **options: object,
) -> None:  # fmt: skip
    """Fail a refused save for the others, if these save that step."""
    is_due = isinstance(step, int) and step % manager.save_interval == 0
    if is_due or options.get("force"):
        fail_call(_client_of(manager), "save", error)


@collective("all processes")
class CheckpointManager:
    """The checkpoints of a run (`shoal.Checkpoints`).

    Collective over all processes.

    A step is committed or absent, every byte is checked when it is restored, and an error in the
    background is raised by the next call. A step is never overwritten.

    Args:
      path: the directory, shared by all processes.
      save_interval: save the steps that it divides.
      max_to_keep: how many of the newest steps to keep; 0: all.
      max_pending_async: positive; there is one save in the background at a time.
      num_of_threads: ignored.
      process_group: None; processes meet through `shoal.initialize`.
      chkpt_on_preemption: also save once a process has received a preemption notice.

    Raises:
      UsageError: an argument is wrong. Also an AssertionError.

    >>> import tempfile, jax.numpy as jnp
    >>> manager = CheckpointManager(tempfile.mkdtemp(), save_interval=10)
    >>> state = {"w": jnp.ones(3)}
    >>> manager.save(9, state), manager.save(10, state), manager.all_steps()
    (False, True, [10])
    """

    base_path: str
    save_interval: int
    max_to_keep: int
    chkpt_on_preemption: bool

    @stands_for("shoal.Checkpoints")
    @takes(
        "torch_xla ", path=path_like, save_interval=whole, max_to_keep=or_none(whole),
        max_pending_async=or_none(whole), chkpt_on_preemption=flag,
    )  # fmt: skip
    def __init__(
        self,
        path: str | os.PathLike[str],
        save_interval: int,
        max_to_keep: int | None = 0,
        max_pending_async: int | None = 1,
        num_of_threads: int | None = 1,
        process_group: Any = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        _check(process_group, save_interval, max_to_keep, max_pending_async)
        self.base_path, self.save_interval = os.fspath(path), int(save_interval)
        self.max_to_keep, self.chkpt_on_preemption = int(max_to_keep or 0), chkpt_on_preemption
        self._kept = Checkpoints(path, keep=max_to_keep or None)

    @collective("all processes")
    def should_save(self, step: int) -> bool:
        """Return whether `save` would save this step without `force`.

        Collective over all processes.
        """
        is_ending = self.chkpt_on_preemption and reached(step)
        return step % self.save_interval == 0 or is_ending

    @collective("all processes")
    @refused_for_all(_fail_save)
    def save(self, step: int, state_dict: Any, force: bool | None = False) -> bool:
        """Save a step if it is due; return once it is committed.

        Collective over all processes.

        Args:
          step: its number.
          state_dict: any tree of arrays and values.
          force: save it even if it is not due.

        Returns:
          Whether it was saved.

        Raises:
          StepAlreadyCommittedError: on all: it is saved already; the saved step is unchanged.
          SaveAbortedError, StorageError, …: as `shoal.Checkpoints.save`, on all.
        """
        is_saved = self.save_async(step, state_dict, force)
        if is_saved:
            self._kept.wait()
        return is_saved

    @collective("all processes")
    @refused_for_all(_fail_save)
    def save_async(self, step: int, state_dict: Any, force: bool | None = False) -> bool:
        """Save a step if it is due; return once it is copied.

        Collective over all processes.

        Args:
          step, state_dict, force: as for `save`.

        Raises:
          StepAlreadyCommittedError: as for `save`.
          SaveAbortedError, StorageError, …: on all: the save before this one failed.
        """
        if not (force or self.should_save(step)):
            return False
        return self._kept.save(step, values_of(state_dict), force=True)

    @collective("all processes")
    @collective_scope("restore", of=_client_of)
    def restore(self, step: int, state_dict: Any) -> Any:
        """Restore a step into a tree, in the tree's layouts; return the tree.

        Collective over all processes.

        Args:
          step: its number.
          state_dict: a tree of arrays: shapes, dtypes and layouts to restore to, on any mesh. Its
            dicts, lists, views and torch tensors receive the values, at any depth; nothing else
            changes.

        Raises:
          NotCommittedError: on all: no such step. Also an AssertionError.
          CorruptCheckpointError, RestoreMismatchError, …: as `shoal.restore`, on all.
        """
        try:
            with errors_named("torch_xla CheckpointManager.restore"):
                restored = self._kept.restore(step, values_of(state_dict))
        except NotCommittedError as error:
            raise UntrackedStep(
                f"torch_xla CheckpointManager.restore (shoal.Checkpoints.restore): Cannot restore "
                f"from untracked step {step}. Valid steps are: {self.all_steps()}",
                path=error.path,
            ) from error
        return _filled(state_dict, restored)

    @local
    def all_steps(self) -> list[int]:
        """Return the committed steps, as storage lists them now, the same on all processes.

        Local.
        """
        return list(self._kept.all_steps())

    @collective("all processes")
    def join(self) -> None:
        """Wait for the save in the background; raise its error if it failed.

        Collective over all processes.
        """
        self._kept.wait()

    @collective("all processes")
    def reached_preemption(self, step: int) -> bool:
        """Return whether to stop: True from one agreed step on (`shoal.preempted`).

        Collective over all processes.

        Raises:
          UsageError: `chkpt_on_preemption` is off. Also an AssertionError.
        """
        if not self.chkpt_on_preemption:
            raise SpmdError(
                "torch_xla CheckpointManager.reached_preemption (shoal.preempted): Preemption "
                "detection not enabled: make the manager with chkpt_on_preemption=True"
            )
        return preempted(step)

    def _load_tracked_chkpts(self) -> list[int]:
        return self.all_steps()

    def _get_path(self, step: int) -> str:
        return str(self._kept.path_of(step))

    def _delete_chkpt_at_step(self, step: int) -> None:
        self._kept.delete(step)

    def _release_oldest_checkpoints(self) -> None:
        """Do nothing: each commit deletes the steps that `max_to_keep` does not keep."""

    def _wait_for_data(self) -> None:
        """Do nothing: `Checkpoints.save` waits for the arrays that it copies."""

    def _save(self, step: int, state_dict: Any) -> None:
        self.save(step, state_dict, force=True)


def _filled(target: Any, restored: Any) -> Any:
    """Fill a tree's own dicts, lists, views and torch tensors with restored values; return it."""
    if isinstance(target, XLAShardedTensor):
        target.global_tensor = restored
    elif is_tensor(target):
        fill(target, restored)
    elif isinstance(target, dict | list):
        for key in target if isinstance(target, dict) else range(len(target)):
            target[key] = _filled(target[key], restored[key])
    else:  # a leaf; or a tuple or the like: a new one
        mine, theirs = _NODES.flatten(target), _NODES.flatten(restored)
        if mine is None or theirs is None:
            return restored
        pairs = zip(mine.children, theirs.children, strict=True)
        return _NODES.rebuild(target, [_filled(*pair) for pair in pairs])
    return target


def _check(process_group: Any, *values: int | None) -> None:
    if process_group is not None:
        raise NoMeaningHere(
            "torch_xla CheckpointManager (shoal.Checkpoints): processes meet through "
            "shoal.initialize(); leave process_group out"
        )
    limits = (
        ("save_interval", 1, "positive"),
        ("max_to_keep", 0, "non-negative"),
        ("max_pending_async", 1, "positive"),
    )
    problems = [
        f"{name} must be {kind}, not {value!r}"
        for (name, least, kind), value in zip(limits, values, strict=True)
        if (value or 0) < least
    ]
    raise_all("Checkpoints", problems)
