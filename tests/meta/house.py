"""The house rules of CONTRIBUTING.md: sizes, names, words, and no state or assert in a module."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from meta.source import Tree, docstring_nodes, nodes, parse, scopes

FILE_LINES, FUNCTION_LINES, COLUMNS = 600, 60, 100

BANNED_FILES = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
# A process is a process. `rank` is the number of dims of an array, so it is banned only where
# processes are the subject.
BANNED_WORDS = {"worker", "workers", "client", "clients", "task", "tasks"}
PROCESS_FOLDERS = ("runtime/", "collectives/")
BANNED_THERE = {"rank", "ranks"}
QUOTES_JAX = {"runtime/jax_service/jax_runtime.py"}  # fills in JAX's own interfaces, in JAX's words

# The module-level state there is. Caches of pure functions are functools.cache.
STATE_ALLOWED = {
    "runtime/process.py": {"_RECORD"},  # who this process is
    "arrays/bridge/use_mesh.py": {"_mesh"},  # of the block that a thread or coroutine is in
}
QUOTED = "multihost_utils"  # a predecessor's name: its facade and what tests it bear it
FACADE = re.compile(r"compat/\w+/__init__\.py")
# A suite of tests that is shipped: there an assert is a test's.
ASSERTS_ALLOWED = {"testing/coordinator_contract.py"}
STATEFUL = {
    "Barrier", "Condition", "ContextVar", "Counter", "Event", "Lock", "OrderedDict", "Queue",
    "RLock", "Semaphore", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "bytearray",
    "count", "defaultdict", "deque", "dict", "list", "local", "set",
}  # fmt: skip
MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
    "setdefault", "update",
}  # fmt: skip
NAMELESS = {
    "AssertionError", "BaseException", "Exception", "NotImplementedError", "RuntimeError",
    "TypeError", "ValueError",
}  # fmt: skip
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
READ_ONLY = {"Mapping", "Sequence", "Collection", "Iterable"}  # a type checker guards these
FROZEN = {"NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "Protocol", "TypedDict"}


def long_files(tree: Tree) -> list[str]:
    """Find files over 600 lines and lines over 100 columns."""
    problems = []
    for path, text in tree.items():
        lines = text.splitlines()
        if len(lines) > FILE_LINES:
            problems.append(f"{path}: {len(lines)} lines, at most {FILE_LINES}")
        problems += [
            f"{path}:{number}: {len(line)} columns, at most {COLUMNS}"
            for number, line in enumerate(lines, 1)
            if len(line) > COLUMNS
        ]
    return problems


def long_functions(tree: Tree, limit: int = FUNCTION_LINES) -> list[str]:
    """Find functions over 60 lines, or another limit, their docstring not counted."""
    problems = []
    for path, text in tree.items():
        for node in _functions(parse(text)):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            if lines > limit:
                problems.append(
                    f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {limit}"
                )
    return problems


def file_names(tree: Tree) -> list[str]:
    """Find files and folders that are named after nothing."""
    return [
        f"{path}: {word!r} says nothing about what is inside"
        for path in tree
        for word in re.split(r"[/_.]", path.removesuffix(".py").replace(QUOTED, ""))
        if word in BANNED_FILES
    ]


def inner_doors(tree: Tree) -> list[str]:
    """Find inner __init__.py files that hold more, or less, than a docstring.

    That of a facade is its predecessor's door: there it also imports from its own files, and lists
    what it imports in `__all__`.
    """
    problems = []
    for path, text in tree.items():
        if not path.endswith("/__init__.py"):
            continue
        module = parse(text)
        rest = [node for node in module.body[1:] if not FACADE.match(path) or not _opens(node)]
        if ast.get_docstring(module) is None or rest:
            problems.append(f"{path}: an inner __init__.py holds a docstring and nothing else")
    return problems


def _opens(node: ast.stmt) -> bool:
    """Is it an import, or `__all__`?"""
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets] == ["__all__"]
    return isinstance(node, ast.ImportFrom)


def asserts(tree: Tree) -> list[str]:
    """Find assert statements: python -O drops them, and users deserve an error."""
    return [
        f"{path}:{node.lineno}: assert"
        for path, text in tree.items()
        if path not in ASSERTS_ALLOWED
        for node in nodes(parse(text))
        if isinstance(node, ast.Assert)
    ]


def names_that_stand_twice(tree: Tree) -> list[str]:
    """Find classes of one name in two files, and modules that are another's plural.

    Facades have the names of their predecessors.
    """
    problems = []
    homes: dict[str, list[str]] = {}
    ours = {path: text for path, text in tree.items() if not path.startswith("compat/")}
    for path, text in ours.items():
        for node in parse(text).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path)
    for name, paths in homes.items():
        if len(paths) > 1:
            problems.append(f"{name} is a class of {' and of '.join(paths)}")
    stems = {path.rsplit("/")[-1].removesuffix(".py"): path for path in ours}
    problems += [
        f"{stems[stem + 's']}: {stem}s is the plural of {stems[stem]}"
        for stem in stems
        if stem + "s" in stems
    ]
    return problems


def nameless_errors(tree: Tree) -> list[str]:
    """Find errors that say neither who must act nor what is missing: raise one of shoal.errors."""
    return [
        f"{path}:{node.lineno}: raises {name}"
        for path, text in tree.items()
        for node in nodes(parse(text))
        if isinstance(node, ast.Raise) and node.exc is not None
        for name in [ast.unparse(node.exc).split("(")[0]]
        if name in NAMELESS
    ]


def words(tree: Tree) -> list[str]:
    """Find names that use a banned word, a banned prefix, or a duration without its unit."""
    problems = []
    for path, text in tree.items():
        if path in QUOTES_JAX or path.startswith("compat/"):  # whose names are the predecessors'
            continue
        banned = BANNED_WORDS | (BANNED_THERE if path.startswith(PROCESS_FOLDERS) else set())
        stem = path.rsplit("/")[-1].removesuffix(".py")
        for name, line, kind in [(stem, 1, "file"), *_defined_names(parse(text))]:
            spoken = re.findall(r"[a-z]+|[A-Z][a-z]*", name)
            for word in sorted(banned & {part.lower() for part in spoken}):
                problems.append(f"{path}:{line}: {name}: the word is process, not {word}")
            if kind == "function" and re.match(r"_*(get|create)_", name):
                problems.append(f"{path}:{line}: {name}: no get_ or create_ prefix")
            if kind == "argument" and name in ("timeout", "delay", "interval", "nbytes"):
                problems.append(f"{path}:{line}: {name}: say the unit, _s or _bytes")
    return problems


def module_state(tree: Tree) -> list[str]:
    """Find module-level mutable state: everything takes what it needs as arguments."""
    problems = []
    for path, text in tree.items():
        module = parse(text)
        allowed = STATE_ALLOWED.get(path, set())
        tables = set()
        for name, value, line, kind in _module_values(module):
            constant = name.strip("_").isupper() or name.startswith("__") or kind in READ_ONLY
            if constant and isinstance(value, DISPLAYS):
                tables.add(name)  # a table of constants, as long as nobody writes to it
            elif name not in allowed and _is_mutable(value, module):
                problems.append(f"{path}:{line}: {name} is mutable module-level state")
        problems += [
            f"{path}:{line}: {name} is changed; a table of constants never is"
            for name, line in _writes(module)
            if name in tables
        ]
        problems += [
            f"{path}:{node.lineno}: global {', '.join(node.names)}"
            for node in nodes(module)
            if isinstance(node, ast.Global) and not set(node.names) <= allowed
        ]
    return problems


def shadowing_exports(tree: Tree) -> list[str]:
    """Find top-level exports that a folder or file under src/shoal would shadow."""
    taken = {path.split("/")[0].removesuffix(".py") for path in tree}
    exported = set()
    for node in nodes(parse(tree.get("__init__.py", ""))):
        if isinstance(node, ast.ImportFrom):
            exported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported |= set(ast.literal_eval(node.value))
    return [f"__init__.py: {name} is also a module of ours" for name in sorted(exported & taken)]


def _functions(module: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _defined_names(module: ast.Module) -> Iterator[tuple[str, int, str]]:
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, "function"
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.lineno, "class"
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, "argument"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno, "variable"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno, "attribute"


def _module_values(module: ast.Module) -> Iterator[tuple[str, ast.expr, int, str]]:
    """Yield name, value, line and annotated kind of what an import assigns, in classes too."""
    for node, at_import in scopes(module):
        if not at_import or getattr(node, "value", None) is None:
            continue
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                kind = ast.unparse(getattr(node, "annotation", target)).split("[")[0]
                yield target.id, node.value, node.lineno, kind


def _is_mutable(value: ast.expr, module: ast.Module) -> bool:
    if isinstance(value, DISPLAYS):
        return True
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).split(".")[-1]
    return name in STATEFUL or name in _unfrozen_classes(module)


@functools.cache
def _unfrozen_classes(module: ast.Module) -> set[str]:
    """Return the classes of this file whose instances can change."""
    return {
        node.name
        for node in nodes(module)
        if isinstance(node, ast.ClassDef)
        and not FROZEN & {ast.unparse(base).split(".")[-1] for base in node.bases}
        and not any("frozen=True" in ast.unparse(mark) for mark in node.decorator_list)
    }


def _writes(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names whose content some statement changes."""
    prose = docstring_nodes(module)
    for node in nodes(module):
        if id(node) in prose:
            continue
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node.value), node.lineno
        elif isinstance(node, ast.AugAssign):
            yield ast.unparse(node.target), node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in MUTATORS:
                yield ast.unparse(node.func.value), node.lineno
