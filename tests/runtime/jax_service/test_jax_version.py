"""Another JAX than the tested ones: a line, or an error that says which versions to take."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys

import jax
import pytest

import shoal
from shoal.errors import InitializeError
from shoal.runtime.jax_service import jax_runtime


@pytest.mark.skipif(
    jax.__version_info__[:2] > jax_runtime.NEWEST_TESTED, reason="this JAX is newer"
)
def test_the_installed_jax_is_one_that_was_tested():
    assert jax_runtime.check_version() == ""


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [("0.10.0", False), ("0.12.99", False), ("0.13.0", True), ("1.0.0", True)],
)
def test_a_newer_jax_is_a_line_with_both_versions(version, is_newer, monkeypatch):
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr(jax, "__version_info__", tuple(map(int, version.split("."))))
    line = jax_runtime.check_version()
    assert line == is_newer * (
        f"shoal {shoal.__version__} was tested with JAX up to 0.12, and this is JAX {version}"
    )


def test_initialize_logs_the_line(child_env):
    program = "import jax, shoal; jax.__version_info__ = (9, 0, 0); shoal.initialize()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=child_env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was tested with JAX up to 0.12, and this is JAX") == 1


@pytest.mark.parametrize("module", jax_runtime.PRIVATE)
def test_a_private_name_that_is_gone_is_an_error_with_the_versions_to_take(module, monkeypatch):
    names = {**jax_runtime.PRIVATE, module: (*jax_runtime.PRIVATE[module], "renamed.here")}
    monkeypatch.setattr(jax_runtime, "PRIVATE", names)
    message = (
        f"shoal {shoal.__version__} does not work with JAX {jax.__version__}, which has no "
        f"{module}.renamed.here\n"
        "install a newer shoal, or a JAX that this one was tested with: at most 0.12"
    )
    with pytest.raises(InitializeError, match=f"^{re.escape(message)}$"):
        jax_runtime.check_version()


def test_a_mesh_that_jax_does_not_name_any_more_is_the_same_error(monkeypatch):
    from jax._src import mesh

    monkeypatch.delattr(mesh, "get_concrete_mesh")
    with pytest.raises(InitializeError, match=r"has no jax\._src\.mesh\.get_concrete_mesh"):
        jax_runtime.current_mesh()


def test_a_script_under_shoal_run_starts_on_a_jax_with_other_clusters(monkeypatch):
    from jax._src import clusters

    monkeypatch.delattr(clusters.ClusterEnv, "auto_detect_unset_distributed_params")
    before = [*clusters.ClusterEnv._cluster_types]
    jax_runtime.serve_unmodified_scripts()
    assert clusters.ClusterEnv._cluster_types == before


def chain(node: ast.AST) -> list[str]:
    """Return `["state", "client"]` for `state.client`."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def used() -> set[str]:
    """Return the private names of JAX that the file uses: `jax._src.mesh.get_concrete_mesh`."""
    source = inspect.getsource(jax_runtime)
    modules = {  # by the names of variables
        "_jax": "jaxlib._jax",
        "bridge": "jax._src.xla_bridge",
        "distributed": "jax._src.distributed",
        "state": "jax._src.distributed.global_state",
        **{n: f"jax._src.{n}" for n in ("api", "clusters", "config", "mesh", "xla_bridge")},
        **{n: f"jax._src.{n}" for n in ("compilation_cache", "compiler")},
    }
    assert set(re.findall(r"from jax\._src import (.+)", source)) <= {
        *modules, "api, distributed", "compilation_cache, compiler"
    }  # fmt: skip
    chains = (chain(node) for node in ast.walk(ast.parse(source)))
    found = {".".join([modules[path[0]], *path[1:]]) for path in chains if path[0] in modules}
    lookup = r'getattr\(sys\.modules\.get\("(jax\._src[\w.]+)"\), "(\w+)"'
    return found | {f"{module}.{name}" for module, name in re.findall(lookup, source)}


def is_part(one: str, other: str) -> bool:
    return f"{other}.".startswith(f"{one}.")


def test_the_table_has_all_private_names_that_are_used_and_no_others():
    tables = (jax_runtime.PRIVATE, jax_runtime.CACHE_HOOKS, jax_runtime.PROGRAM_HOOKS)
    rows = [row for table in tables for row in table.items()]
    listed = {f"{module}.{name.partition('(')[0]}" for module, names in rows for name in names}
    names = used() - {"jax._src.clusters.__name__"}
    # of what the table has, names further in are JAX's own: `global_state.client.key_value_set`
    assert {n for n in names if not any(is_part(n, o) or is_part(o, n) for o in listed)} == set()
    assert {o for o in listed if not any(is_part(o, n) for n in names)} == set()
