"""Workflows, hooks and the Makefile agree: what a code host runs, a developer can run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from meta.repository import missing_targets

RUN = re.compile(r"^ *(?:- )?run: *(.*)$", re.MULTILINE)
MAKE = re.compile(r'make (?:([a-z-]+)|"\$TARGET")')  # TARGET: of each row of the job's matrix
ROW = re.compile(r"\btarget: ([a-z-]+)")
PYTHON = re.compile(r"""\bpython(?:-version)?: (?!\$)["']?([\w.]+)""")
LINT = re.compile(r"^lint:.*\n((?:\t.*\n)+)", re.MULTILINE)
HOOK = re.compile(r"^ *entry: (.*)$", re.MULTILINE)


def command_problems(workflows: Mapping[str, str], makefile: str) -> list[str]:
    """Find commands of workflows that are not `make` of one target that exists."""
    problems, called = [], {}
    for path, text in workflows.items():
        commands = RUN.findall(text)
        made = [MAKE.fullmatch(command) for command in commands]
        problems += [
            f"{path}: {command!r}: move it into the Makefile"
            for command, make in zip(commands, made, strict=True)
            if not make
        ]
        targets = [*(make[1] for make in made if make and make[1]), *ROW.findall(text)]
        called[path] = "".join(f"make {target}\n" for target in targets)
    return problems + missing_targets(called, makefile)


def python_problems(workflows: Mapping[str, str], claimed: Iterable[str], first: str) -> list[str]:
    """Compare the Pythons of workflows with those that the package claims.

    Args:
      workflows: texts by path.
      claimed: versions, as in the classifiers.
      first: the path of the workflow that must run all of them.
    """
    used = {path: set(PYTHON.findall(text)) for path, text in workflows.items()}
    return [
        *(
            f"{path}: Python {version} is not claimed"
            for path, versions in used.items()
            for version in sorted(versions - {*claimed})
        ),
        *(f"{first}: Python {version} is missing" for version in sorted({*claimed} - used[first])),
    ]


def hook_problems(hooks: str, makefile: str) -> list[str]:
    """Compare the commands of `make lint` with those that the hooks run on some files."""
    linted = [line.strip() for line in LINT.search(makefile)[1].splitlines()]
    linted = [line.removeprefix("$(VENV)/bin/") for line in linted]
    entries = [entry.removeprefix(".venv/bin/") for entry in HOOK.findall(hooks)]
    hooked = [entry.removesuffix(" --force-exclude") for entry in entries]
    return [
        *(
            f"make lint: {line!r} is in no hook"
            for line in linted
            if not any(f"{line} ".startswith(f"{hook} ") for hook in hooked)
        ),
        *(
            f"hook {hook!r} is not in make lint"
            for hook in hooked
            if not any(f"{line} ".startswith(f"{hook} ") for line in linted)
        ),
    ]
