"""The house rules hold, and each check of them can fail."""

from __future__ import annotations

import pytest

from meta import house
from meta.source import Tree, package_tree, repository_tree

EVERYWHERE = (house.long_lines,)
LIBRARY = (
    house.dense_conditionals,
    house.unnamed_arguments,
    house.misplaced_walruses,
    house.inner_doors,
    house.asserts,
    house.locking_handlers,
    house.nameless_errors,
    house.classes_that_stand_twice,
    house.module_state,
    house.shadowing_exports,
)


@pytest.mark.parametrize("check", EVERYWHERE, ids=lambda check: check.__name__)
def test_the_repository_keeps(check):
    problems = check(repository_tree())
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("check", LIBRARY, ids=lambda check: check.__name__)
def test_the_library_keeps(check):
    problems = check(package_tree())
    assert not problems, "\n".join(problems)


STATE = "is mutable module-level state"
BAD = (
    # the tree, the check, what it must say
    ({"a.py": "\nx = '" + "y" * 95 + "'"}, house.long_lines, "a.py:2: 101 columns, at most 100"),
    ({"a.py": "\nx = 1 if a and b else 2"}, house.dense_conditionals,
     "a.py:2: a conditional expression with and/or in its test"),
    ({"a.py": "x = 1 if f(a or b) else 2"}, house.dense_conditionals,
     "a.py:1: a conditional expression with and/or in its test"),
    ({"a.py": "x = 1 if a else 2 if b else 3"}, house.dense_conditionals,
     "a.py:1: a conditional expression around another one"),
    ({"a.py": "x = f(\n    1\n    if a\n    else 2\n)"}, house.dense_conditionals,
     "a.py:2: a conditional expression over several lines"),
    ({"a.py": "x = f'{1 if a else 2}'"}, house.dense_conditionals,
     "a.py:1: a conditional expression inside an f-string"),
    ({"a.py": "\nf(a, b, c, d, None)"}, house.unnamed_arguments,
     "a.py:2: name the arguments of this call"),
    ({"a.py": "\nif x := f():\n    pass"}, house.misplaced_walruses,
     "a.py:2: assign x on a line of its own"),
    ({"a.py": "if a:\n    pass\nelse:\n    if x := f():\n        pass"}, house.misplaced_walruses,
     "a.py:4: assign x on a line of its own"),
    ({"a.py": "x = g(y := 1)"}, house.misplaced_walruses, "a.py:1: assign y on a line of its own"),
    ({"a.py": "while g(z := f()):\n    pass"}, house.misplaced_walruses,
     "a.py:1: assign z on a line of its own"),
    ({"plan/__init__.py": "'''Plan.'''\nfrom shoal.plan.mesh import Mesh"}, house.inner_doors,
     "plan/__init__.py: an inner __init__.py holds a docstring and nothing else"),
    ({"plan/__init__.py": ""}, house.inner_doors,
     "plan/__init__.py: an inner __init__.py holds a docstring and nothing else"),
    ({"compat/theirs/__init__.py": "'''Theirs.'''\nx = 1"}, house.inner_doors,
     "compat/theirs/__init__.py: an inner __init__.py holds a docstring and nothing else"),
    ({"a.py": "def f(x):\n    assert x"}, house.asserts, "a.py:2: assert"),
    ({"a.py": "signal.signal(2, lambda *_: over.set())"}, house.locking_handlers,
     "a.py:1: a handler of signals calls set"),
    ({"a.py": "class A:\n    def f(self):\n        signal.signal(2, self.take)\n"
      "    def take(self, number, frame):\n        self.lock.acquire()"}, house.locking_handlers,
     "a.py:5: a handler of signals calls acquire"),
    ({"a.py": "def f(x):\n    raise ValueError('bad')"}, house.nameless_errors,
     "a.py:2: raises ValueError"),
    ({"a.py": "def f(x):\n    raise NotImplementedError"}, house.nameless_errors,
     "a.py:2: raises NotImplementedError"),
    ({"plan/a.py": "class Step: ...", "runtime/b.py": "class Step: ..."},
     house.classes_that_stand_twice, "Step is a class of plan/a.py and of runtime/b.py"),
    ({"a.py": "seen = {}"}, house.module_state, f"a.py:1: seen {STATE}"),
    ({"a.py": "_seen: list[int] = []"}, house.module_state, f"a.py:1: _seen {STATE}"),
    ({"a.py": "import threading\nLOCK = threading.Lock()"}, house.module_state,
     f"a.py:2: LOCK {STATE}"),
    ({"a.py": "class Job: ...\njob = Job()"}, house.module_state, f"a.py:2: job {STATE}"),
    ({"a.py": "class Job:\n    seen = set()"}, house.module_state, f"a.py:2: seen {STATE}"),
    ({"a.py": "ROWS = {}\ndef f(x):\n    ROWS[x] = 1"}, house.module_state,
     "a.py:3: ROWS is changed; a table of constants never is"),
    ({"a.py": "ROWS = []\ndef f(x):\n    ROWS.append(x)"}, house.module_state,
     "a.py:3: ROWS is changed; a table of constants never is"),
    ({"a.py": "x = 0\ndef f():\n    global x\n    x = 1"}, house.module_state, "a.py:3: global x"),
    ({"__init__.py": "from shoal.plan.mesh import Mesh as plan", "plan/mesh.py": ""},
     house.shadowing_exports, "__init__.py: plan is also a module of ours"),
    ({"__init__.py": "__all__ = ['draw']", "draw/text.py": ""},
     house.shadowing_exports, "__init__.py: draw is also a module of ours"),
)  # fmt: skip


@pytest.mark.parametrize(("tree", "check", "words"), BAD, ids=[b[2].split(": ")[-1] for b in BAD])
def test_a_bad_tree_is_found(tree: Tree, check, words):
    assert words in check(tree)


def test_a_good_tree_passes_every_check():
    good = {
        "__init__.py": "from shoal.plan.mesh import Mesh as Mesh\n__all__ = ['Mesh']",
        "plan/__init__.py": "'''Decides.'''",
        "compat/theirs/__init__.py": "'''Theirs.'''\nfrom shoal.a import Mesh\n__all__ = ['Mesh']",
        "runtime/process.py": "class R: ...\n_RECORD = R()",
        "plan/mesh.py": "from typing import NamedTuple\nimport functools\nTABLE = {'a': 1}\n"
        "class P(NamedTuple):\n    x: int\n    y: Mapping[str, int] = {}\nORIGIN = P(1)\n"
        "x = f'{y}' if y else (a and b)\n"
        "while (z := f()) is not None:\n    w = tuple(v for u in z if (v := g(u)))\n"
        "if x:\n    pass\nelif z := f():\n    pass\n"
        "@functools.cache\ndef create(rank, timeout_s):\n    raise UsageError(rank)\n",
    }
    assert [problem for check in (*EVERYWHERE, *LIBRARY) for problem in check(good)] == []
