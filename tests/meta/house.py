"""The house rules of CONTRIBUTING.md: lines, doors, errors, no state or assert in a module."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from meta.source import PACKAGE, Tree, docstring_nodes, nodes, parse, scopes

COLUMNS = 100

# The module-level state there is. Caches of pure functions are functools.cache.
STATE_ALLOWED = {
    "runtime/process.py": {"_RECORD"},  # who this process is
    "arrays/bridge/use_mesh.py": {"_mesh"},  # of the block that a thread or coroutine is in
    "runtime/system/shapes_only.py": {"_shapes_only"},  # the same
    "runtime/system/threads.py": {"_WORKERS"},  # of the share that a thread does
}
FACADE = re.compile(r"compat/(\w+/)?__init__\.py")
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
LOCKING = {"acquire", "notify", "notify_all", "put", "set", "wait"}
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
READ_ONLY = {"Mapping", "Sequence", "Collection", "Iterable"}  # a type checker guards these
MOST_UNNAMED = 4  # arguments
SAYS_ITSELF = (ast.Name, ast.Attribute)
TABLES = {"plan/hardware/tpu_generations.py"}  # rows of figures, in columns
FROZEN = {"NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "Protocol", "TypedDict"}


def long_lines(tree: Tree) -> list[str]:
    """Find lines over 100 columns."""
    return [
        f"{path}:{number}: {len(line)} columns, at most {COLUMNS}"
        for path, text in tree.items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > COLUMNS
    ]


def dense_conditionals(tree: Tree) -> list[str]:
    """Find conditional expressions (`a if b else c`) that a reader has to take apart."""
    problems = []
    for path, text in tree.items():
        module = parse(text)
        for node in conditionals(module):
            what = f"{path}:{node.lineno}: a conditional expression"
            if any(isinstance(part, ast.BoolOp) for part in ast.walk(node.test)):
                problems.append(f"{what} with and/or in its test")
            if len(conditionals(node)) > 1:
                problems.append(f"{what} around another one")
            if node.lineno != node.end_lineno:
                problems.append(f"{what} over several lines")
        problems += [
            f"{path}:{node.lineno}: a conditional expression inside an f-string"
            for node in nodes(module)
            if isinstance(node, ast.JoinedStr) and conditionals(node)
        ]
    return problems


def unnamed_arguments(tree: Tree) -> list[str]:
    """Find calls with more than four arguments by position that are not all variables.

    A variable says what it is; a literal or an expression in such a row does not.
    """
    problems = []
    for path, text in tree.items():
        if path in TABLES:
            continue
        for call in nodes(parse(text)):
            if not isinstance(call, ast.Call):
                continue
            given = [value for value in call.args if not isinstance(value, ast.Starred)]
            if len(given) <= MOST_UNNAMED or ast.unparse(call.func).startswith("_LOG."):
                continue  # logging takes no names
            if not all(isinstance(value, SAYS_ITSELF) for value in given):
                problems.append(f"{path}:{call.lineno}: name the arguments of this call")
    return problems


def conditionals(tree: ast.AST) -> list[ast.IfExp]:
    """Return the conditional expressions of a tree."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.IfExp)]


def misplaced_walruses(tree: Tree) -> list[str]:
    """Find walruses (`:=`) where an assignment on the line before does as well.

    It does not in the test of a `while` or an `elif`, or in the condition of a comprehension: there
    the value would be computed twice. Even there, one inside a call is easily overlooked.
    """
    problems = []
    for path, text in tree.items():
        module = parse(text)
        fit = {id(one) for node in nodes(module) for test in _repeated(node) for one in _open(test)}
        problems += [
            f"{path}:{one.lineno}: assign {one.target.id} on a line of its own"
            for one in walruses(module)
            if id(one) not in fit
        ]
    return problems


def walruses(tree: ast.AST) -> list[ast.NamedExpr]:
    """Return the assignments inside expressions."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.NamedExpr)]


def _repeated(node: ast.AST) -> list[ast.expr]:
    """Return the tests of a node before which no line can stand."""
    if isinstance(node, ast.While):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.If):
        # an `if` alone in an `else` is the same to `ast`, but is indented
        elifs = [one for one in node.orelse if one.col_offset == node.col_offset]
        return [one.test for one in elifs if isinstance(one, ast.If)]
    return []


def _open(test: ast.expr) -> list[ast.NamedExpr]:
    """Return the walruses of a test that are in no call and no other expression of their own."""
    if isinstance(test, ast.NamedExpr):
        return [test]
    if isinstance(test, ast.Call | ast.IfExp | ast.JoinedStr | ast.Lambda):
        return []
    parts = [part for part in ast.iter_child_nodes(test) if isinstance(part, ast.expr)]
    return [one for part in parts for one in _open(part)]


def inner_doors(tree: Tree) -> list[str]:
    """Find inner __init__.py files that hold more, or less, than a docstring.

    Those of `compat` are doors, too: they also import, and list what they import in `__all__`.
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
        if path != "testing/store_contract.py"  # tests, which pytest runs
        for node in nodes(parse(text))
        if isinstance(node, ast.Assert)
    ]


def locking_handlers(tree: Tree) -> list[str]:
    """Find handlers of signals that use an Event, or a lock: the interrupted code may hold it."""
    problems = []
    for path, text in tree.items():
        module = parse(text)
        functions = {node.name: node for node in nodes(module) if isinstance(node, ast.FunctionDef)}
        for call in nodes(module):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "signal.signal":
                continue
            handler: ast.AST = call.args[1]
            if isinstance(handler, SAYS_ITSELF):
                handler = functions.get(ast.unparse(handler).split(".")[-1], handler)
            problems += [
                f"{path}:{node.lineno}: a handler of signals calls {node.func.attr}"
                for node in ast.walk(handler)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
                if node.func.attr in LOCKING
            ]
    return problems


def classes_that_stand_twice(tree: Tree) -> list[str]:
    """Find classes of one name in two files. Facades have the names of their predecessors."""
    homes: dict[str, list[str]] = {}
    for path, text in tree.items():
        for node in () if path.startswith("compat/") else parse(text).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path)
    return [
        f"{name} is a class of {' and of '.join(paths)}"
        for name, paths in homes.items()
        if len(paths) > 1
    ]


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
        # `from shoal import planning` names a module itself, which shadows nothing
        if isinstance(node, ast.ImportFrom) and node.module != PACKAGE:
            exported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported |= set(ast.literal_eval(node.value))
    return [f"__init__.py: {name} is also a module of ours" for name in sorted(exported & taken)]


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
