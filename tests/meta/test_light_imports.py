"""What an import must not load: planning and launching work where JAX is slow, or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from meta.floors import FLOORS, NOT_HELD, place
from meta.source import module_name, package_tree

HEAVY = ("jax", "jaxlib", "torch", "tensorflow", "scipy", "sklearn")

PROBE = """
import json, sys
before = {{*sys.modules}}  # a .pth file of the environment may load anything at the start
{program}
print(json.dumps(sorted({{name.split(".")[0] for name in {{*sys.modules}} - before}} & {unwanted})))
"""


def loaded_by(program: str, unwanted: tuple[str, ...], folder: object = "") -> list[str]:
    """Run a program in a process of its own; return which unwanted packages it has loaded."""
    probe = subprocess.run(
        [sys.executable, "-c", PROBE.format(program=program, unwanted=set(unwanted))],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert probe.returncode == 0, probe.stderr
    return json.loads(probe.stdout.splitlines()[-1])


def modules_up_to(level: int) -> list[str]:
    """Return the modules of the floors 0 to `level`, and the door."""
    names = [module_name(path) for path in package_tree()]
    return ["shoal", *(name for name in names if FLOORS[place(name)].level <= level)]


def importing(names: list[str]) -> str:
    """Return a program that imports them all."""
    return "\n".join(f"import {name}" for name in names)


def test_every_public_name_loads_in_a_fresh_process():
    """Not only once something else has imported a submodule."""
    program = """
import shoal
found = {*vars(shoal), *shoal._LAZY, *shoal._REEXPORTS}
assert found >= {*dir(shoal)}, {*dir(shoal)} - found
for name in dir(shoal):
    getattr(shoal, name)
"""
    assert loaded_by(program, ()) == []


def test_the_planning_core_loads_numpy_and_nothing_heavier():
    names = modules_up_to(1)
    assert {"shoal", "shoal.plan.hlo", "shoal.plan.shards"} <= set(names)
    assert loaded_by(importing(names), (*HEAVY, "ml_dtypes", "rich", "typer", "xxhash")) == []


def test_processes_can_meet_without_jax():
    assert loaded_by(importing(modules_up_to(2)), (*HEAVY, "rich", "typer")) == []


def test_the_services_of_a_job_start_without_numpy():
    names = ["server.coordinator", "startup.services"]
    names += [f"jax_service.{name}" for name in ("host_agent", "jax_runtime")]
    modules = [f"shoal.runtime.{name}" for name in names]
    assert loaded_by(importing(["shoal", *modules]), (*HEAVY, "numpy")) == []


def test_coordinator_imports_no_slow_modules():
    slow = ("dataclasses", "inspect", "logging", "pathlib", "subprocess", "tempfile", "traceback")
    assert loaded_by("import shoal.runtime.server.coordinator", slow) == []


def test_a_job_on_this_host_is_launched_with_little():
    program = """
        import os, sys
        sys.argv = ["shoal", "run", "-n", "1", "--log-dir", os.devnull, os.devnull]
        import shoal.cli.main as m
        from shoal.launch.restarts import Attempts
        from shoal.launch.launchers import SingleHost
        try:
            m.main()
        except SystemExit as end:
            assert end.code == 2  # once all options are read
    """
    slow = ("email", "hashlib", "hmac", "pydantic", "rich")
    assert loaded_by(textwrap.dedent(program), slow) == []


def test_checkpoints_are_listed_and_read_without_jax():
    parts = tuple(
        f"checkpoint/{name}/"
        for name in ("blocks", "bucket", "disk", "format", "planning", "store", "tree")
    )
    paths = [path for path in package_tree() if path.startswith(parts) and path not in NOT_HELD]
    names = [module_name(path) for path in paths]
    names += ["shoal.checkpoint.history.checkpoints", "shoal.checkpoint.restoring.restore"]
    assert len(names) > 30
    assert loaded_by(importing(names), (*HEAVY, "rich", "typer")) == []


def test_types_of_checkpoints_are_imported_without_jax():
    program = "from shoal.types import CheckpointInfo, JobStatus, RestorePlan\nimport shoal.types"
    assert loaded_by(program, HEAVY) == []


def test_the_command_line_shows_its_help_without_jax():
    program = "import typer.main, shoal.cli.main as m\ntyper.main.get_command(m.build(m.COMMANDS))"
    assert loaded_by(program, HEAVY) == []


@pytest.mark.parametrize("package", ["jax", "torch"])
def test_a_heavy_import_is_found(package, tmp_path):
    (tmp_path / f"{package}.py").write_text("")
    (tmp_path / "culprit.py").write_text(f"import {package}")
    assert loaded_by("import culprit", HEAVY, tmp_path) == [package]
