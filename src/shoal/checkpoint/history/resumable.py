"""Check that a run could be resumed as it begins and at each save, before the job is preempted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.checkpoint.format.records import LeafRecord, Manifest
from shoal.checkpoint.tree import flatten, nodes
from shoal.checkpoint.tree.dtypes import dtype_name, dtype_of
from shoal.checkpoint.tree.flatten import PerProcess
from shoal.checkpoint.tree.names import ROOT, component, name_of
from shoal.checkpoint.tree.plain_values import plain_json
from shoal.errors import RestoreMismatchError, UsageError, with_article
from shoal.runtime.system.shapes_only import for_shapes_only

if TYPE_CHECKING:
    from shoal.checkpoint.restoring.protocol import RestoreRequest
    from shoal.checkpoint.restoring.target import LeafRequests, TargetOptions
    from shoal.checkpoint.saving.state import State

_LOG = logging.getLogger("shoal")
_MOST_LISTED = 8


class Asked:
    """What `resume` was asked for: each state that is saved must fit it, or no later one resumes.

    Args:
      request: its target and options.
      made: the leaves that `init` makes; None: they are not compared.
    """

    def __init__(self, request: RestoreRequest, made: Leaves | None) -> None:
        is_tree, options = request.rebuild is not None, request.options
        if is_tree and options.rename is None:  # no message shall advise it: `resume` refuses it
            options = options._replace(rename=str)
        # Of the target its layouts and shapes are kept, and none of its arrays.
        rebuild = list if is_tree else None
        self._request = request._replace(given=(), rebuild=rebuild, options=options)
        self._made = made
        self._fitting: object = None  # the names, shapes and dtypes that were compared last

    def check(self, state: State, step: int) -> None:
        """Refuse a state that `resume` would refuse once it is saved.

        It is compared if names, shapes or dtypes of its leaves are not those of the state before.

        Raises:
          RestoreMismatchError: names all leaves concerned.
        """
        from shoal.checkpoint.restoring.protocol import leaf_requests_of

        records = [leaf.record for leaf in state.leaves]
        looks = [
            (record.name, record.kind, record.dtype, record.shape, record.impl)
            for record in records
        ]
        if looks == self._fitting:
            return
        manifest = Manifest(
            attempt="0" * 12,
            step=step,
            created_ns=0,
            num_processes=1,
            tree=state.structure,
            leaves=(*records,),
        )
        refused = f"save({step}): `resume` would refuse this state as a checkpoint"
        try:
            leaf_requests = leaf_requests_of(self._request, manifest).all
        except RestoreMismatchError as error:
            error.args = (listing(f"{refused}, for its target", error.problems, _SAVE_ELSEWHERE),)
            raise
        if self._made is not None:
            detail, options = f"{refused}: `init` makes another", self._request.options
            casts = {
                leaf_request.leaf: leaf_request.dtype
                for leaf_request in leaf_requests
                if leaf_request.dtype is not None
            }
            leaves = leaves_of(
                replace(record, dtype=dtype_name(casts[index])) if index in casts else record
                for index, record in enumerate(records)
            )
            taken = {records[leaf_request.leaf].name for leaf_request in leaf_requests}
            left_out = {record.name for record in records} - taken
            saved, made = (
                {name: leaf for name, leaf in each.items() if name not in left_out}
                for each in (leaves, self._made)
            )
            compare(saved, made, options, detail, _SAVE_ELSEWHERE)
        self._fitting = looks


def check_resumable(state: Any, request: RestoreRequest, *, processes: int, is_new: bool) -> Leaves:
    """Restore the state at the beginning of a run as if its first save had saved it.

    Args:
      request: the target and options.
      processes: how many save it.
      is_new: `init` made it; False: it was restored.

    Returns:
      Its leaves.

    Raises:
      RestoreMismatchError: the same target and options would not restore it, or not as the same
        tree; names all leaves and nodes concerned.
      UsageError: it cannot be saved; names all leaves.
    """
    try:
        from shoal.checkpoint.restoring.protocol import leaf_requests_of
        from shoal.checkpoint.saving.state import read_state, refuse_device_axis
    except ImportError:  # without JAX nothing is saved
        return {}
    read = read_state(state, processes, "resume")
    if processes > 1:
        refuse_device_axis(read, "resume")
    records = tuple(leaf.record for leaf in read.leaves)
    stored, _ = nodes.decode_structure(nodes.encode_structure(read.structure), "the manifest")
    manifest = Manifest(
        attempt="0" * 12,
        step=None,
        created_ns=0,
        num_processes=processes,
        tree=stored,
        leaves=records,
    )
    made = "what `init` made could not" if is_new else "what was restored could not again"
    detail = f"resume: {made} be restored by this target once it is saved"
    if request.options.rename is not None:
        detail += (
            "\nit is saved under the names of the target, where rename= looks for others: restore "
            "an older step once with rename=, save it, and resume without"
        )
    try:
        leaf_requests = leaf_requests_of(request, manifest)
        differences = _Differences(state, read, leaf_requests, request, manifest).lines
    except RestoreMismatchError as error:
        error.args = (f"{detail}\n{error}",)
        raise
    except UsageError as error:  # a class takes no such children
        differences = [str(error)]
    if differences:
        raise RestoreMismatchError(listing(detail, differences), problems=differences)
    return leaves_of(records)


def listing(detail: str, lines: Sequence[str], remedy: str = "") -> str:
    """Return a message that lists the first of some lines."""
    more = len(lines) - _MOST_LISTED
    listed = [*lines[:_MOST_LISTED], *([f"and {more} more"] if more > 0 else [])]
    return "\n".join([detail, *(f"  - {line}" for line in listed), *filter(None, [remedy])])


class _Differences:
    """What differs between a state and what is restored of it."""

    def __init__(
        self,
        state: Any,
        read: State,
        leaf_requests: LeafRequests,
        request: RestoreRequest,
        manifest: Manifest,
    ) -> None:
        from shoal.checkpoint.restoring.filling import own_value
        from shoal.checkpoint.restoring.protocol import built
        from shoal.checkpoint.tree.jax_nodes import JaxNodes

        self.lines: list[str] = []
        self._walk = flatten.NodeTaker(JaxNodes(), None)
        leaves = [leaf for _, leaf in flatten.flatten_tree(state, JaxNodes())[0]]
        self._given = {id(given): given for given in request.given}
        self._arrays: dict[int, list[str]] = {}  # id → the names of its leaves
        values = []
        for leaf_request in leaf_requests.all:
            record, value = manifest.leaves[leaf_request.leaf], leaves[leaf_request.leaf]
            if record.kind == "per_process":
                blob = read.leaves[leaf_request.leaf].value.data
                value = own_value(blob, JaxNodes(), leaf_request.like, record.name)
            elif record.kind == "array":
                value = _stand_in(value, record, is_placed=leaf_request.place is not None)
                self._arrays.setdefault(id(value), []).append(record.name)
            values.append(value)
        self._values = values  # alive, or others would get their ids
        again = built(request, manifest, leaf_requests, values)
        self._compare(state, again, ())

    def _compare(self, value: Any, other: Any, path: tuple[str, ...]) -> None:
        mine, theirs = self._walk.branch(value), self._walk.branch(other)
        if isinstance(value, PerProcess) and isinstance(other, PerProcess):
            self._compare(value.value, other.value, path)
            return
        if mine is None and theirs is None:
            self._compare_leaves(value, other, path)
            return
        name = _name(path)
        if mine is None or theirs is None or type(value) is not type(other):
            remedy = "; pass a target that has the class"
            if isinstance(other, flatten.UnknownNode):
                remedy = f": {other.remedy}"
            what = f"is {_kind(value)}, and would come back as {_kind(other)}"
            if _kind(value) == _kind(other):
                what = f"is {_kind(value)}, a name that has another class by now"
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

    def _compare_leaves(self, value: Any, other: Any, path: tuple[str, ...]) -> None:
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
    return [component(key) for key in keys] or [str(index) for index in range(len(children))]


def _kind(value: Any) -> str:
    kind = type(value)
    return "a leaf" if value is None else with_article(f"{kind.__module__}.{kind.__qualname__}")


def _plain(static: Any) -> Any:
    """Return static data as JSON; None if they are not plain, and not compared."""
    try:
        return [plain_json(static)]
    except UsageError:
        return None


# ---- Compare the arrays of a state with those that `init` makes.
#
# Numbers, strings and per-process values may change as they like. None stands for what a run has
# only sometimes, and a number for an array of rank 0: `step=0`, which `jit` makes an array.


class _Leaf(NamedTuple):
    """A leaf without its value."""

    kind: str  # "array", "key", "none", or that of another value
    dtype: np.dtype[Any] | str = ""  # of an array; of a key its generator
    shape: tuple[int, ...] = ()

    @property
    def has_shape(self) -> bool:
        return self.kind in ("array", "key")

    def __str__(self) -> str:
        if not self.has_shape:
            return self.kind
        sizes = ",".join(map(str, self.shape))
        return f"key<{self.dtype}>[{sizes}]" if self.kind == "key" else f"{self.dtype}[{sizes}]"


Leaves = Mapping[str, _Leaf]

_SAVE_ELSEWHERE = "nothing was saved; save other trees by shoal.save, to a path of their own"
_MAY_CHANGE = (
    "if shapes or dtypes of the state change while it trains, pass check_init=False to `resume`"
)
_OTHER_RUN = (
    "to continue that run, make `init` as it was; to start another, use a directory of its own"
)


def made_by(init: Any) -> Leaves | None:
    """Return the leaves that `init` makes, which is a function or a state; None if unknown.

    A function is traced: it makes nothing.
    """
    try:
        return _traced(init) if callable(init) else leaves_in(init)
    except Exception as error:  # noqa: BLE001 - whatever it is, `init` is not called for its state
        name = type(error).__name__
        _LOG.debug("resume: `init` is not compared with the checkpoint: %s: %s", name, error)
        return None


def _traced(init: Callable[[], Any]) -> Leaves:
    """Return the leaves of what a function would make. Raises what it raises when it is traced."""
    import jax

    leaves: Leaves = {}

    def make() -> None:
        # Read in here: `eval_shape` returns no strings, and numbers only as arrays.
        nonlocal leaves
        leaves = leaves_in(init())

    with for_shapes_only():
        jax.eval_shape(make)
    return leaves


def compare_restored(state: Leaves, made: Leaves, options: TargetOptions, where: str) -> None:
    """Refuse a restored state of which `init` makes another.

    Raises:
      RestoreMismatchError: names all leaves, with both shapes and dtypes.
    """
    detail = f"resume: {where} is not of the state that `init` makes"
    compare(state, made, options, detail, _OTHER_RUN)


def compare(state: Leaves, made: Leaves, options: TargetOptions, detail: str, remedy: str) -> None:
    """Refuse a state of which `init` makes another; what `only` leaves out is not compared.

    An `init` without arrays, such as None, is not compared.

    Raises:
      RestoreMismatchError: names all leaves, with both shapes and dtypes.
    """
    if not any(leaf.has_shape for leaf in made.values()):
        return
    names = dict.fromkeys([*made, *state])
    lines: list[str] = []
    kinds: dict[str, list[str]] = {
        "missing": [], "unexpected": [], "wrong_shape": [], "wrong_dtype": []
    }  # fmt: skip
    taken = options.selection([*names]).names
    for name in names:
        if name not in taken:
            continue
        its, mine = _at(state, name), _at(made, name)
        kind = _difference(its, mine)
        if kind:
            kinds[kind].append(name)
            lines.append(
                f"{name}: is {its or 'not there'}, and `init` makes {mine or 'no such leaf'}"
            )
    if lines:
        raise RestoreMismatchError(
            listing(detail, lines, f"{remedy}\n{_MAY_CHANGE}"), problems=lines, **kinds
        )


def _at(leaves: Leaves, name: str) -> _Leaf | None:
    """Return the leaf of a name, or None above it, in place of all that it may become."""
    if name in leaves:
        return leaves[name]
    parts = name.split("/")
    above = (leaves.get("/".join(parts[:end])) for end in range(len(parts)))
    return next((leaf for leaf in above if leaf is not None and leaf.kind == "none"), None)


def _difference(its: _Leaf | None, mine: _Leaf | None) -> str:
    """Return how a leaf of a state differs from what `init` makes; "": not at all."""
    pair = (its, mine)
    if not any(leaf is not None and leaf.has_shape for leaf in pair):
        return ""
    if its is None:
        return "missing"
    if mine is None:
        return "unexpected"
    if "none" in (its.kind, mine.kind):
        return ""
    if its.shape != mine.shape:
        return "wrong_shape"
    if its.has_shape and mine.has_shape and _on_devices(its) != _on_devices(mine):
        return "wrong_dtype"
    return ""


def _on_devices(leaf: _Leaf) -> object:
    """Return the dtype that a leaf has once a program has run; of texts the width may differ."""
    from shoal.arrays.host.host_values import NO_ARRAYS, device_dtype

    dtype = leaf.dtype
    if isinstance(dtype, str):
        return dtype
    if dtype.kind in "iufc" and dtype not in NO_ARRAYS:
        return device_dtype(dtype)
    return dtype.kind if dtype.kind in "SU" else dtype


def leaves_of(records: Iterable[LeafRecord]) -> Leaves:
    """Return the leaves that are saved."""
    return {record.name: _of_record(record) for record in records}


def _of_record(record: LeafRecord) -> _Leaf:
    if record.kind == "key":
        return _Leaf("key", record.impl, record.shape)
    if record.kind == "array":
        return _Leaf("array", dtype_of(record.dtype), record.shape)
    return _Leaf(record.kind)


def leaves_in(tree: Any) -> Leaves:
    """Return the leaves of a tree, with or without values."""
    from shoal.checkpoint.tree.jax_nodes import JaxNodes

    leaves = flatten.flatten_tree(tree, JaxNodes(), operation="resume")[0]
    return {name_of(path): _of_value(leaf) for path, leaf in leaves}


def _of_value(value: Any) -> _Leaf:
    import jax

    from shoal.collectives.leaves import leaf_of

    if value is None:
        return _Leaf("none")
    if not isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        return _Leaf(type(value).__name__)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        key = leaf_of("", jax.ShapeDtypeStruct((), value.dtype))
        return _Leaf("key", str(getattr(key, "impl", "")), tuple(value.shape))
    return _Leaf("array", value.dtype, tuple(value.shape))
