"""Another JAX than the tested ones: a line, or an error that says which versions to take."""

from __future__ import annotations

import ast
import inspect
import logging
import re

import pytest

import jax
import shoal
from shoal.errors import InitializeError
from shoal.runtime.jax_service import jax_runtime


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


def test_initialize_logs_the_line(monkeypatch, caplog):
    monkeypatch.setattr(jax, "__version_info__", (9, 0, 0))
    shoal.shutdown()
    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.initialize()
    (record,) = caplog.records
    assert "was tested with JAX up to 0.12, and this is JAX" in record.getMessage()


@pytest.mark.parametrize("module", jax_runtime.PRIVATE)
def test_a_private_name_that_is_gone_is_an_error_with_the_versions_to_take(module, monkeypatch):
    names = {**jax_runtime.PRIVATE, module: (*jax_runtime.PRIVATE[module], "renamed.here")}
    monkeypatch.setattr(jax_runtime, "PRIVATE", names)
    words = (
        f"shoal {shoal.__version__} does not work with JAX {jax.__version__}, which has no "
        f"{module}.renamed.here\n"
        "install a newer shoal, or a JAX that this one was tested with: pip install 'jax==0.12.*'"
    )
    with pytest.raises(InitializeError, match=f"^{re.escape(words)}$"):
        jax_runtime.check_version()


def test_a_mesh_that_jax_does_not_name_any_more_is_the_same_error(monkeypatch):
    from jax._src import mesh

    monkeypatch.delattr(mesh, "get_concrete_mesh")
    with pytest.raises(InitializeError, match=r"has no jax\._src\.mesh\.get_concrete_mesh"):
        jax_runtime.current_mesh()


def test_all_private_names_that_are_used_are_in_the_table():
    tree = ast.parse(inspect.getsource(jax_runtime))
    modules = {  # as they are imported: name → module
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("jax._src", "jaxlib")
        for alias in node.names
    }
    used = {
        f"{modules[node.value.id]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    }
    listed = {
        f"{module}.{name.split('.')[0]}"
        for module, names in jax_runtime.PRIVATE.items()
        for name in names
    }
    assert set(modules.values()) == set(jax_runtime.PRIVATE)
    assert used <= listed
