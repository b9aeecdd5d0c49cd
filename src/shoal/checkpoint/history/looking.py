"""Read-only queries of a history."""

from __future__ import annotations

from shoal.checkpoint.bucket.address import Bucket, below
from shoal.checkpoint.history.checkpoint_info import CheckpointInfo, info_of
from shoal.checkpoint.history.saver import Saver
from shoal.checkpoint.planning.policies import Best, Saved
from shoal.checkpoint.store import saved_steps
from shoal.checkpoint.store.interface import Store
from shoal.checkpoint.store.step_names import step_name
from shoal.colour import local
from shoal.errors import UsageError, nearest


class ReadOnlyHistory:
    """Mixin: the steps, their metrics, the best step, contents, and whether a save runs."""

    _root: Store
    _bucket: Bucket | None  # as given: an address alone does not have its options
    _saver: Saver

    @property
    def path(self) -> str:
        """The directory of all steps."""
        return self._root.path

    @local
    def path_of(self, step: int) -> str | Bucket:
        """Return the path of a step, which need not exist, for `shoal.restore` and other tools.

        Local.

        Of a run in a `Bucket`, it is a `Bucket` with the same options; `str` of that is the
        address, which the command takes: `shoal ckpt show ADDRESS`.
        """
        number = saved_steps.step_number("path_of", step)
        return path_of_step(self._root, self._bucket, number)

    @local
    def all_steps(self, *, skip_corrupt: bool = False) -> tuple[int, ...]:
        """Return the committed steps in order, as storage lists them now.

        Local.

        Raises:
          CorruptCheckpointError: a COMMIT is damaged, unless `skip_corrupt`.
        """
        return tuple(
            saved.step for saved in saved_steps.commits(self._root, skip_corrupt=skip_corrupt)
        )

    @local
    def latest(self, *, skip_corrupt: bool = False) -> int | None:
        """Return the newest committed step, as storage lists it now; None if there is none.

        Local.

        Raises:
          CorruptCheckpointError: the newest COMMIT is damaged, unless `skip_corrupt`.
        """
        return saved_steps.chosen(self._root, skip_corrupt=skip_corrupt)

    @property
    def is_saving(self) -> bool:
        """Is a save of this process still running? False once it is over, successful or not.

        It can differ between processes. To save when no save runs, pass `every="free"`.
        """
        return self._saver.is_saving

    @local
    def all_metrics(self, *, skip_corrupt: bool = False) -> dict[int, dict[str, float]]:
        """Return the committed steps, in order, each with its `save(metrics=…)`.

        Local.

        Raises:
          CorruptCheckpointError: as `all_steps`.
        """
        saved = saved_steps.commits(self._root, skip_corrupt=skip_corrupt)
        return {committed.step: dict(committed.commit.metrics) for committed in saved}

    @local
    def best_step(
        self, metric: str, mode: str = "min", *, skip_corrupt: bool = False
    ) -> int | None:
        """Return the committed step with the best `metric`: the one that `Best(1, …)` keeps.

        Local.

        Args:
          metric: its name in `save(metrics=…)`.
          mode: "min" or "max": whether lower or higher is better.
          skip_corrupt: as for `all_steps`.

        Returns:
          The step; of equals the newest. None: no step has metrics, or this one is NaN.

        Raises:
          UsageError: steps have metrics, and none has this one.
          CorruptCheckpointError: as `all_steps`.
        """
        best = Best(1, metric, mode)
        metrics_of = self.all_metrics(skip_corrupt=skip_corrupt)
        names = sorted({name for metrics in metrics_of.values() for name in metrics})
        if names and metric not in names:
            detail = f"no step has it, but {', '.join(names[:8])}{nearest(metric, names)}"
            raise UsageError(f"best_step: metric={metric!r}: {detail}")
        kept = best.kept([Saved(step, 0.0, metrics) for step, metrics in metrics_of.items()])
        return next(iter(kept), None)

    @local
    def info(self, step: int | None = None) -> CheckpointInfo:
        """Return the contents of a step, without its data, as `shoal.checkpoint_info` does.

        Local.

        It first waits for a running save of this history, if that is of this step.

        Args:
          step: None: the newest step, after any running save.

        Raises:
          NotCommittedError: nothing is saved, or not that step.
          SaveAbortedError, StorageError, …: the save that it waited for failed; the next collective
            call raises that again.
          CorruptCheckpointError, UnsupportedCheckpointError, StorageError: it cannot be read.
        """
        wanted = None if step is None else saved_steps.step_number("info", step)
        self._saver.await_step(wanted)
        chosen = saved_steps.chosen(self._root, wanted, skip_corrupt=False)
        if chosen is None:
            raise saved_steps.none_saved(self._root)
        return info_of(self._root.step(chosen))


def path_of_step(root: Store, bucket: Bucket | None, step: int) -> str | Bucket:
    """Return the path of a step; of a run in a bucket, with that bucket's options."""
    if bucket is not None:
        return below(bucket, step_name(step))
    return root.step(step).path
