"""The floors hold, and each check of them can fail."""

from __future__ import annotations

import pytest

from meta import floors
from meta.floors import PRIVATE_JAX_FILE as JAX_FILE
from meta.source import Tree, package_tree

CHECKS = (
    floors.upward_imports,
    floors.foreign_imports,
    floors.held_down,
    floors.without_sentences,
    floors.private_jax,
    floors.computed_imports,
    floors.cycles,
    floors.folder_cycles,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_library_keeps(check):
    problems = check(package_tree())
    assert not problems, "\n".join(problems)


BAD = (
    # what is wrong, the tree, the check, what it must say
    ("plan imports runtime", {"plan/a.py": "import shoal.runtime.b", "runtime/b.py": ""},
     floors.upward_imports, "plan/a.py:1: plan may not import shoal.runtime.b"),
    ("from-import upwards", {"plan/a.py": "from shoal.arrays.placing.put import put"},
     floors.upward_imports, "plan/a.py:1: plan may not import shoal.arrays.placing.put"),
    ("relative import upwards", {"plan/a.py": "\nfrom ..runtime import b", "runtime/b.py": ""},
     floors.upward_imports, "plan/a.py:2: plan may not import shoal.runtime.b"),
    ("only for types",
     {"runtime/a.py": "from typing import TYPE_CHECKING\n"
      "if TYPE_CHECKING:\n    from shoal.arrays.placing.put import put"},
     floors.upward_imports, "runtime/a.py:3: runtime may not import shoal.arrays.placing.put"),
    ("inside a function", {"errors.py": "def f():\n    import shoal.plan.mesh"},
     floors.upward_imports, "errors.py:2: errors may not import shoal.plan.mesh"),
    ("the door from inside", {"cli/a.py": "import shoal"},
     floors.upward_imports, "cli/a.py:1: cli may not import shoal"),
    ("by string", {"plan/a.py": "import importlib\nimportlib.import_module('shoal.cli.main')"},
     floors.upward_imports, "plan/a.py:2: plan may not import shoal.cli.main"),
    ("across floor 6", {"draw/a.py": "from shoal.compat import dtensor"},
     floors.upward_imports, "draw/a.py:1: draw may not import shoal.compat"),
    ("a directory without a floor", {"attic/a.py": ""},
     floors.upward_imports, "attic/a.py: 'attic' has no floor; add it to FLOORS in tests/meta"),
    ("plan imports jax", {"plan/a.py": "import jax.numpy as jnp"},
     floors.foreign_imports, "plan/a.py:1: may not import jax.numpy"),
    ("plan imports jax in a function", {"plan/a.py": "def f():\n    from jax import jit"},
     floors.foreign_imports, "plan/a.py:2: may not import jax"),
    ("errors imports numpy", {"errors.py": "import numpy"},
     floors.foreign_imports, "errors.py:1: may not import numpy"),
    ("the launcher imports jax", {"runtime/a.py": "def f():\n    import jax"},
     floors.foreign_imports, "runtime/a.py:2: may not import jax"),
    ("the JAX file imports it too early", {JAX_FILE: "import jax"},
     floors.foreign_imports, f"{JAX_FILE}:1: imports jax outside a function"),
    ("the format imports jax", {"checkpoint/format/joined_parts.py": "def f():\n    import jax"},
     floors.held_down, "checkpoint/format/joined_parts.py:2: is held to the floor of plan: jax"),
    ("the format imports the disk",
     {"checkpoint/format/joined_parts.py": "from shoal.checkpoint.disk.storage import Folder",
      "checkpoint/disk/storage.py": ""},
     floors.held_down,
     "checkpoint/format/joined_parts.py:1: is held to the floor of plan: "
     "shoal.checkpoint.disk.storage"),
    ("a rule makes a sentence",
     {"runtime/rules/a.py": "def f():\n    from shoal.runtime.failures.b import said"},
     floors.without_sentences,
     "runtime/rules/a.py:2: shoal.runtime.failures.b makes sentences: answer with values"),
    ("private jax", {"arrays/a.py": "import jax._src.mesh"},
     floors.private_jax, f"arrays/a.py:1: jax._src.mesh is for {JAX_FILE} alone"),
    ("private jax, from", {"arrays/a.py": "from jax import _src"},
     floors.private_jax, f"arrays/a.py:1: jax._src is for {JAX_FILE} alone"),
    ("private jax as an attribute", {"arrays/a.py": "import jax\nm = jax._src.mesh"},
     floors.private_jax, f"arrays/a.py:2: jax._src is for {JAX_FILE} alone"),
    ("private jax by getattr", {"arrays/a.py": "import jax\nm = getattr(jax, '_src')"},
     floors.private_jax, f"arrays/a.py:2: jax._src is for {JAX_FILE} alone"),
    ("private jax by string", {"arrays/a.py": "__import__('jax._src.mesh')"},
     floors.private_jax, f"arrays/a.py:1: jax._src.mesh is for {JAX_FILE} alone"),
    ("private jax in a program", {"cli/a.py": "P = 'import jax._src'"},
     floors.private_jax, f"cli/a.py:1: jax._src is for {JAX_FILE} alone"),
    ("private jax where another is watched", {"launch/child.py": "NAME = 'jax._src.mesh'"},
     floors.private_jax, f"launch/child.py:1: jax._src is for {JAX_FILE} alone"),
    ("jaxlib", {"arrays/a.py": "from jaxlib import _jax"},
     floors.private_jax, f"arrays/a.py:1: jaxlib is for {JAX_FILE} alone"),
    ("a computed name", {"plan/a.py": "import importlib\nimportlib.import_module('shoal.' + x)"},
     floors.computed_imports, "plan/a.py:2: imports a module of a computed name"),
    ("a cycle around a corner",
     {"plan/a.py": "from shoal.plan import b", "plan/b.py": "def f():\n    import shoal.plan.c",
      "plan/c.py": "from .a import A"},
     floors.cycles, "shoal.plan.a -> shoal.plan.b -> shoal.plan.c -> shoal.plan.a"),
    ("two directories in a circle",
     {"plan/a/b.py": "from shoal.plan.c.d import D", "plan/c/d.py": "", "plan/a/f.py": "",
      "plan/c/e.py": "def f():\n    import shoal.plan.a.f"},
     floors.folder_cycles, "plan/a -> plan/c -> plan/a"),
    ("a directory and one inside it",
     {"plan/a.py": "import shoal.plan.c.d", "plan/b.py": "", "plan/c/d.py": "import shoal.plan.b"},
     floors.folder_cycles, "plan -> plan/c -> plan"),
)  # fmt: skip


@pytest.mark.parametrize(("tree", "check", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_a_bad_tree_is_found(tree: Tree, check, words):
    assert words in check(tree)


def test_a_good_tree_passes_every_check():
    good = {
        "__init__.py": "from shoal.plan.mesh import Mesh as Mesh\n"
        "def __getattr__(name):\n    import importlib\n    return importlib.import_module(name)",
        "errors.py": "import math",
        "plan/mesh.py": "'''Not jax._src.'''\nimport numpy as np\nfrom shoal.errors import E",
        JAX_FILE: "def join():\n    import jax\n    from jax._src import mesh",
        "arrays/placing/put.py": "import jax\nfrom shoal.runtime import jax_runtime",
        "launch/child.py": "NAME = 'jax._src.clusters'",
        "cli/main.py": "import typer\nfrom shoal.plan.mesh import Mesh",
        "checkpoint/format/records.py": "import numpy\nfrom shoal.checkpoint.format import names",
        "checkpoint/format/names.py": "from shoal.errors import UsageError",
    }
    assert [problem for check in CHECKS for problem in check(good)] == []
