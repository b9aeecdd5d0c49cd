"""Check that a run could be resumed as it begins, before the job is preempted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.checkpoint.format.records import LeafRecord, Manifest
from shoal.checkpoint.tree import flatten, nodes
from shoal.checkpoint.tree.dtypes import dtype_of
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.checkpoint.tree.names import ROOT, component
from shoal.checkpoint.tree.plain_values import plain_json
from shoal.errors import RestoreMismatchError, UsageError, with_article

if TYPE_CHECKING:
    from shoal.checkpoint.restoring.protocol import RestoreRequest
    from shoal.checkpoint.restoring.target import Wishes
    from shoal.checkpoint.saving.state import State

_MOST_LISTED = 8


def check_resumable(state: Any, request: RestoreRequest, *, processes: int, is_new: bool) -> None:
    """Restore the state at the beginning of a run as if its first save had saved it.

    Args:
      request: the target and options.
      processes: how many save it.
      is_new: `init` made it; False: it was restored.

    Raises:
      RestoreMismatchError: the same target and options would not restore it, or not as the same
        tree; names all leaves and nodes concerned.
      UsageError: it cannot be saved; names all leaves.
    """
    try:
        from shoal.checkpoint.restoring.protocol import wishes_of
        from shoal.checkpoint.saving.state import read_state, refuse_device_axis
    except ImportError:  # without JAX nothing is saved
        return
    read = read_state(state, processes, "resume")
    if processes > 1:
        refuse_device_axis(read, "resume")
    records = tuple(leaf.record for leaf in read.leaves)
    stored, _ = nodes.decode_structure(nodes.encode_structure(read.structure), "the manifest")
    manifest = Manifest("0" * 12, None, 0, processes, stored, records)
    made = "what `init` made could not" if is_new else "what was restored could not again"
    detail = f"resume: {made} be restored by this target once it is saved"
    if request.options.rename is not None:
        detail += (
            "\nit is saved under the names of the target, where rename= looks for others: restore "
            "an older step once with rename=, save it, and resume without"
        )
    try:
        wishes = wishes_of(request, manifest)
        differences = _Differences(state, read, wishes, request, manifest).lines
    except RestoreMismatchError as error:
        error.args = (f"{detail}\n{error}",)
        raise
    except UsageError as error:  # a class takes no such children
        differences = [str(error)]
    if differences:
        more = (
            [f"and {len(differences) - _MOST_LISTED} more"]
            if len(differences) > _MOST_LISTED
            else []
        )
        lines = "\n".join(f"  - {line}" for line in [*differences[:_MOST_LISTED], *more])
        raise RestoreMismatchError(f"{detail}\n{lines}", problems=differences)


class _Differences:
    """What differs between a state and what is restored of it."""

    def __init__(
        self,
        state: Any,
        read: State,
        wishes: Wishes,
        request: RestoreRequest,
        manifest: Manifest,
    ) -> None:
        from shoal.checkpoint.restoring.filling import own_value
        from shoal.checkpoint.restoring.protocol import built
        from shoal.checkpoint.tree.jax_nodes import JaxNodes

        self.lines: list[str] = []
        self._walk = flatten.NodeTaker(JaxNodes(), None)
        leaves = [leaf for _, leaf in flatten.flatten_tree(state, JaxNodes())[0]]
        self._given = {id(one): one for one in request.given}
        self._arrays: dict[int, list[str]] = {}  # id → the names of its leaves
        values = []
        for wish in wishes.wishes:
            record, value = manifest.leaves[wish.leaf], leaves[wish.leaf]
            if wish.leaf in read.blobs:
                blob = read.blobs[wish.leaf].data
                value = own_value(blob, JaxNodes(), wish.like, record.name)
            elif record.kind == "array":
                value = _stand_in(value, record, is_placed=wish.place is not None)
                self._arrays.setdefault(id(value), []).append(record.name)
            values.append(value)
        self._values = values  # alive, or others would get their ids
        again = built(request, manifest, wishes, values)
        self._compare(state, again, ())

    def _compare(self, one: Any, other: Any, path: tuple[str, ...]) -> None:
        mine, theirs = self._walk.branch(one), self._walk.branch(other)
        if isinstance(one, PerProcess) and isinstance(other, PerProcess):
            self._compare(one.value, other.value, path)
            return
        if mine is None and theirs is None:
            self._compare_leaves(one, other, path)
            return
        name = _name(path)
        if mine is None or theirs is None or type(one) is not type(other):
            remedy = "; pass a target that has the class"
            if isinstance(other, flatten.UnknownNode):
                remedy = f": {other.remedy}"
            what = f"is {_kind(one)}, and would come back as {_kind(other)}"
            if _kind(one) == _kind(other):
                what = f"is {_kind(one)}, a name that has another class by now"
            self.lines.append(f"{name}: {what}{remedy}")
            return
        keys, others = (_keys(level[2], level[3]) for level in (mine, theirs))
        if keys != others:
            odd = ", ".join(
                repr(key) for key in [*keys, *others] if (key in keys) != (key in others)
            )
            odd = odd or f"they would be in the order {', '.join(others)}"
            self.lines.append(f"{name}: its children would not be the same: {odd}")
            return
        static, its_own = _plain(mine[4]), _plain(theirs[4])
        if static is not None and its_own is not None and static != its_own:
            self.lines.append(f"{name}: has static data {mine[4]!r}, the target {theirs[4]!r}")
        for key, child, its in zip(keys, mine[3], theirs[3], strict=True):
            self._compare(child, its, (*path, key))

    def _compare_leaves(self, one: Any, other: Any, path: tuple[str, ...]) -> None:
        from shoal.checkpoint.restoring.wanted import is_placement

        names, own = self._arrays.get(id(other), ()), _name(path)
        if names and own not in names:
            self.lines.append(f"{own}: would have the value of {names[0]}")
        elif not names and id(other) in self._given:
            if is_placement(other):
                what = f"{type(other).__name__}, which is no value"
                self.lines.append(
                    f"{own}: only= leaves it out; the target has {with_article(what)}"
                )


def _stand_in(value: Any, record: LeafRecord, *, is_placed: bool) -> Any:
    """Return an array like the one that a restore would return, and equal to no other."""
    if is_placed and not isinstance(value, np.ndarray | np.generic):
        return value
    return np.broadcast_to(np.zeros((), dtype_of(record.dtype)), record.shape)


def _name(path: tuple[str, ...]) -> str:
    return "/".join(path) or ROOT


def _keys(keys: Sequence[Any], children: Sequence[Any]) -> list[str]:
    """Return the keys of children as text; in lists, their indices."""
    return [component(key) for key in keys] or [str(number) for number in range(len(children))]


def _kind(value: Any) -> str:
    kind = type(value)
    return "a leaf" if value is None else with_article(f"{kind.__module__}.{kind.__qualname__}")


def _plain(static: Any) -> Any:
    """Return static data as JSON; None if they are not plain, and not compared."""
    try:
        return [plain_json(static)]
    except UsageError:
        return None
