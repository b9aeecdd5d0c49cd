"""Every name and member of the predecessors is there, can be called as theirs, and is on its page.

Once a facade is there, it is listed here.
"""

from __future__ import annotations

import doctest
import importlib
import operator
import re
import types

import pytest

import shoal
from compat import predecessors
from meta.source import ROOT
from shoal import names

# facade → the modules of the predecessor whose names it has
FACADES = {
    "shoal.compat.multihost_utils": ("jax.experimental.multihost_utils ",),
    "shoal.compat.torch_xla": ("torch_xla.",),
    "shoal.compat.dtensor": (
        "tf.experimental.dtensor ",
        "tensorflow.dtensor.python.accelerator_util ",
        "tensorflow.dtensor.python.api ",
        "tensorflow.dtensor.python.mesh_util ",
        "tensorflow.dtensor.python.save_restore ",
    ),
}
# a module of a facade that stands for one of the predecessor's
PARTS = {"shoal.compat.dtensor.tpu": ("tensorflow.dtensor.python.tpu_util ",)}


def test_the_table_of_names_is_of_these_facades():
    assert [*names.FACADES] == [*FACADES]


@pytest.mark.parametrize("facade", FACADES | PARTS)
def test_every_name_and_member_is_there(facade):
    rows = predecessors.rows_from((FACADES | PARTS)[facade])
    assert rows
    assert predecessors.problems(importlib.import_module(facade), rows) == []


@pytest.mark.parametrize("facade", FACADES)
def test_every_name_and_member_is_on_its_page(facade):
    path = ROOT / "docs" / "coming-from" / f"{facade.rpartition('.')[2]}.md"
    rows = predecessors.rows_from(FACADES[facade])
    wanted = {row["name"] for row in rows} | {*names.FACADES[facade]}
    wanted |= {member["name"] for row in rows for member in row.get("members", [])} - {"__init__"}
    assert predecessors.unspoken(path.read_text(encoding="utf-8"), wanted) == []


@pytest.mark.parametrize("facade", FACADES)
def test_the_table_has_each_name_of_the_facade_and_one_of_ours(facade):
    module, table = importlib.import_module(facade), names.FACADES[facade]
    for theirs, ours in table.items():
        assert hasattr(module, theirs), theirs
        assert operator.attrgetter(ours)(shoal), ours
    assert {row["name"] for row in predecessors.rows_from(FACADES[facade])} <= {*table}


@pytest.mark.parametrize("facade", FACADES)
def test_a_predecessors_name_in_shoal_itself_says_where_it_is(facade):
    for theirs, ours in names.FACADES[facade].items():
        if theirs in shoal.__all__:
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(shoal, theirs)
        assert f"{facade}.{theirs}" in str(caught.value)
        assert f"shoal.{ours}" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [*names.FORMER.items(), *names.OTHERS.items(), ("SaveAborted", "errors.SaveAbortedError"),
     ("StalledError", "errors.StalledError")],
)  # fmt: skip
def test_a_name_that_is_gone_or_someone_elses_says_ours(old, new):
    operator.attrgetter(new)(shoal)
    with pytest.raises(AttributeError, match=rf"{re.escape(f'shoal.{new}')}( now)?$"):
        getattr(shoal, old)


def test_the_examples_of_this_comparison_hold():
    assert doctest.testmod(predecessors) == (0, 1)


def _facade():
    def broadcast(tree, is_source=None, *, extra=1):
        """Have one parameter more, which can be left out."""

    def gather(tree, tiled):
        """Have one that cannot be left out."""

    def sync(label):
        """Have another name for it."""

    def reach(step, name):
        """Have one that is not theirs, and must be given."""

    class Mesh:
        size: int

        def __init__(self, shape):
            self.shape = shape

        def rows(self, first, last=None):
            """Have what they have."""

    return types.SimpleNamespace(
        broadcast=broadcast, gather=gather, sync=sync, reach=reach, Mesh=Mesh, MATCH="same"
    )


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"name": "broadcast", "kind": "function", "signature": "(tree, is_source=None)"}, []),
        ({"name": "none", "kind": "function", "signature": "()"}, ["none: missing"]),
        ({"name": "gather", "kind": "function", "signature": "(tree, tiled=False)"},
         ["gather: tiled cannot be left out"]),
        ({"name": "sync", "kind": "function", "signature": "(name: str)"},
         ["sync: takes ['label'] by position, not ['name']", "sync: has no parameter name",
          "sync: label must be given, and is not the predecessor's"]),
        ({"name": "reach", "kind": "function", "signature": "(step: int)"},
         ["reach: name must be given, and is not the predecessor's"]),
        ({"name": "MATCH", "kind": "value", "value": "'match'"}, ["MATCH: is 'same', not 'match'"]),
        ({"name": "Mesh", "kind": "class", "members": [
            {"name": "size", "kind": "value", "signature": "size: int"},
            {"name": "rows", "kind": "method", "signature": "(self, first, last=<object>)"},
            {"name": "__init__", "kind": "method", "signature": "(self, shape, name)"},
            {"name": "gone", "kind": "property", "signature": "(self) -> int"}]},
         ["Mesh.__init__: takes ['shape'] by position, not ['shape', 'name']",
          "Mesh.__init__: has no parameter name", "Mesh.gone: missing"]),
    ],
)  # fmt: skip
def test_missing_and_differing_names_are_found(row, told):
    assert predecessors.problems(_facade(), [row]) == told


def test_a_name_that_is_not_on_the_page_is_found():
    page = "`one(two)`, three\n```python\nfour()\n```\n"
    assert predecessors.unspoken(page, {"one", "two", "three", "four"}) == ["three"]


def test_facades_load_no_predecessor_but_jax():
    code = "import sys, shoal.names as names, importlib\n"
    code += "for facade in names.FACADES: importlib.import_module(facade)\n"
    code += "print([name for name in ('tensorflow', 'torch', 'torch_xla') if name in sys.modules])"
    assert _said(code) == "[]\n"


def _said(code):
    import subprocess
    import sys

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
