"""`dtensor.DTensorCheckpoint`: the variables of objects, saved and restored in place."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import jax

from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.colour import collective
from shoal.compat.dtensor.layout import check_dtensor_mesh
from shoal.compat.dtensor.mesh import Mesh
from shoal.compat.dtensor.refused import NotPossible, check_eager, prefix_errors
from shoal.compat.dtensor.saving import Prefix, processes_of, saved_form
from shoal.compat.dtensor.variable import DVariable
from shoal.compat.members import members_of
from shoal.errors import UsageError, raise_all
from shoal.runtime import process
from shoal.runtime.client.interface import JobClient
from shoal.runtime.client.lanes import collective_scope

__all__ = ["DTensorCheckpoint", "Restored"]

_COUNTER = "save_counter"


def _client(*_: object, **__: object) -> JobClient:
    return process.client()


def _members(checkpoint: DTensorCheckpoint, *_: object, **__: object) -> tuple[int, ...] | None:
    return processes_of(checkpoint._mesh)


@collective("the mesh's processes")
class DTensorCheckpoint:
    """The DVariables of objects, saved under their attribute names, restored in place.

    Collective over the mesh's processes.

    `shoal.Checkpoints` keeps the steps of a run; this is the older, smaller API.

    Args:
      mesh: the mesh whose processes save and restore.
      root: an object whose attributes, also those in `__slots__`, are saved under their names.
      kwargs: name → a DVariable, a dict, list or tuple of DVariables, or an object with
        DVariables as attributes.

    Raises:
      UsageError: there is no DVariable to save, or two have the same name.

    >>> import tempfile
    >>> from shoal.compat import dtensor
    >>> mesh = dtensor.create_mesh({"x": 8})
    >>> w = DVariable(jax.numpy.ones(8), layout=dtensor.Layout(["x"], mesh))
    >>> checkpoint = DTensorCheckpoint(mesh, params={"w": w})
    >>> path = checkpoint.save(tempfile.mkdtemp() + "/ckpt")
    >>> zeroed = w.assign_sub(w)
    >>> status = checkpoint.restore(path).assert_consumed()
    >>> float(w.numpy().sum())
    8.0
    """

    def __init__(self, mesh: Mesh, root: Any = None, **kwargs: Any) -> None:
        self._mesh = check_dtensor_mesh(mesh)
        self._root = root
        self._named = kwargs
        self.save_counter = 0
        if _COUNTER in self._tree():
            raise UsageError(f"dtensor.DTensorCheckpoint: the name {_COUNTER} is reserved")
        if not jax.tree.leaves(self._tree()):
            raise UsageError(
                "dtensor.DTensorCheckpoint: the arguments contain no DVariable; arrays cannot be "
                "set in place: shoal.save and shoal.restore take any tree"
            )

    def _tree(self) -> dict[str, Any]:
        """Return the current DVariables, in nested dicts.

        Raises:
          UsageError: two of them have the same name.
        """
        tracked = _tracked(self._root, ())
        if _is_variable(tracked):
            raise UsageError("dtensor.DTensorCheckpoint: name a variable: root=… → v=…")
        named = {name: _tracked(value, ()) for name, value in self._named.items()}
        kept = {name: tree for name, tree in named.items() if tree is not None}
        root = tracked or {}
        clashes = [name for name in kept if name in root and not _is_same(root[name], kept[name])]
        raise_all(
            "dtensor.DTensorCheckpoint",
            [f"{name}= is given, but root.{name} exists already" for name in clashes],
        )
        return {**root, **kept}

    @collective_scope("DTensorCheckpoint.write", of=_client, among=_members)
    def write(self, file_prefix: Prefix, options: Any = None) -> str:
        """Save at a path, and return it."""
        operation = "DTensorCheckpoint.write"
        check_eager(operation, "save what the program returns")
        _no_options(operation, options)
        form = partial(saved_form, operation, "a variable")
        tree = jax.tree.map(form, self._tree(), is_leaf=_is_variable)
        with prefix_errors(operation):
            save(
                file_prefix, {**tree, _COUNTER: self.save_counter},
                processes=processes_of(self._mesh), name=f"dtensor.{operation}",
            )  # fmt: skip
        return str(file_prefix)

    @collective_scope("DTensorCheckpoint.save", of=_client, among=_members)
    def save(self, file_prefix: Prefix, options: Any = None) -> str:
        """Save at a path with the next number, and return it: prefix-1, prefix-2, …"""
        self.save_counter += 1
        try:
            return self.write(f"{file_prefix}-{self.save_counter}", options)
        except BaseException:  # which one process alone may have raised before it counted
            self.save_counter -= 1
            raise

    @collective_scope("DTensorCheckpoint.read", of=_client, among=_members)
    def read(self, save_path: Prefix | None, options: Any = None) -> Restored:
        """Set all variables to the values saved at a path; None: do nothing.

        Raises:
          RestoreMismatchError: names, shapes or dtypes differ; nothing was set.
        """
        operation = "DTensorCheckpoint.read"
        check_eager(operation, "pass in the variables' values instead")
        _no_options(operation, options)
        if save_path is None:
            return Restored()
        variables = self._tree()
        target = {**jax.tree.map(DVariable.read_value, variables, is_leaf=_is_variable)}
        with prefix_errors(operation):
            values = restore(
                save_path, {**target, _COUNTER: 0}, dtype="safe",
                processes=processes_of(self._mesh), name=f"dtensor.{operation}",
            )  # fmt: skip
        self.save_counter = int(values.pop(_COUNTER))
        jax.tree.map(DVariable.assign, variables, values, is_leaf=_is_variable)
        return Restored()

    restore = read


class Restored:
    """The status of a restore; everything is restored, so its assertions always hold."""

    def assert_consumed(self) -> Self:
        """Return itself: an incomplete restore raises RestoreMismatchError."""
        return self

    assert_existing_objects_matched = assert_nontrivial_match = expect_partial = assert_consumed


def _is_variable(value: Any) -> bool:
    return isinstance(value, DVariable)


def _no_options(operation: str, options: Any) -> None:
    if options is not None:
        raise NotPossible(
            f"dtensor.{operation}: options={options!r} are TensorFlow's; shoal.Checkpoints saves "
            "in the background without them"
        )


def _tracked(value: Any, above: tuple[int, ...]) -> Any:
    """Return the DVariables in a value, by name in nested dicts; None if there are none."""
    if _is_variable(value):
        return value
    if id(value) in above:  # a cyclic reference
        return None
    members: dict[str, Any] = {}
    for key, member in members_of(value):
        tree = _tracked(member, (*above, id(value)))
        if tree is not None and members.setdefault(str(key), tree) is not tree:
            raise UsageError(
                f"dtensor.DTensorCheckpoint: two keys of one {type(value).__name__} map to the "
                f"name {str(key)!r}: {key!r}, and one of another type"
            )
    return members or None


def _is_same(one: Any, other: Any) -> bool:
    """Are these the same variables under the same names?"""
    if _is_variable(one) or _is_variable(other):
        return one is other
    return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
