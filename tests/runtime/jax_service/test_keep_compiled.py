"""JAX stores what it compiles in our files, and loads it from them, unless its own cache is set."""

from __future__ import annotations

import errno
import logging
import os
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P, monitoring
from jax._src import compilation_cache, compiler, distributed

import shoal
from shoal.runtime.jax_service import jax_runtime

HITS, REQUESTS = "cache_hits", "compile_requests_use_cache"


@pytest.fixture
def events(monkeypatch):
    """Return JAX's own events of its cache, which is as it was afterwards."""
    recorded: list[str] = []
    load, write = compilation_cache.get_executable_and_time, compiler._cache_write
    monkeypatch.setattr(compilation_cache, "get_executable_and_time", load)
    monkeypatch.setattr(compiler, "_cache_write", write)

    def listen(event: str, **_: object) -> None:
        recorded.append(event.rpartition("/")[2])

    monitoring.register_event_listener(listen)
    yield recorded
    monitoring.unregister_event_listener(listen)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def keep(root: Path, *, is_asked: bool = True) -> str:
    return jax_runtime.keep_compiled(str(root), is_asked=is_asked)


def compute() -> float:
    """Compile a program, the same one each time, and return its result."""
    return float(jax.jit(lambda x: jnp.sin(x) + 3 * x)(np.float32(2.0)))


RESULT = float(np.sin(np.float32(2.0)) + 6)


def stored(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_a_program_is_stored_once_and_loaded_from_then_on(tmp_path, events):
    assert keep(tmp_path) == ""
    results = [compute() for _ in range(3)]
    assert results == pytest.approx([RESULT] * 3)
    assert (events.count(REQUESTS), events.count(HITS)) == (3, 2)
    assert len(stored(tmp_path)) == 1


def test_every_process_of_a_job_stores(tmp_path, events, monkeypatch):
    monkeypatch.setattr(distributed.global_state, "process_id", 3)
    assert keep(tmp_path) == ""
    assert [compute(), compute()] == pytest.approx([RESULT] * 2)
    assert events.count(HITS) == 1


def test_the_option_of_jax_stays_unset(tmp_path, events):
    keep(tmp_path)
    compute()
    assert jax.config.jax_compilation_cache_dir is None


def test_a_flipped_entry_is_compiled_and_stored_anew(tmp_path, events):
    keep(tmp_path)
    compute()
    (path,) = stored(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert [compute(), compute()] == pytest.approx([RESULT] * 2)
    assert events.count(HITS) == 1


def test_an_entry_that_jax_cannot_load_is_a_line_once(tmp_path, events, caplog):
    keep(tmp_path)
    cache = compilation_cache._cache
    read, keys = cache.get, []
    cache.get = lambda key: keys.append(key) or read(key)
    compute()
    for _ in range(2):
        cache._entries.remove(keys[0])
        cache._entries.write(keys[0], b"nothing that JAX has written")
        assert compute() == pytest.approx(RESULT)
    assert events.count(HITS) == 0
    assert compute() == pytest.approx(RESULT)
    assert events.count(HITS) == 1
    (line,) = [record.getMessage() for record in caplog.records if record.name == "shoal"]
    assert line.startswith(f"JAX cannot load what it has stored in {tmp_path}/jax-")


def test_a_full_disk_is_a_line_once(tmp_path, events, caplog, monkeypatch):
    keep(tmp_path)

    def rename(_source: str, _target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as `write` does, without a name

    monkeypatch.setattr(os, "rename", rename)
    assert [compute(), compute()] == pytest.approx([RESULT] * 2)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "shoal"]
    assert line.startswith(f"the compile cache takes no more programs: {tmp_path}/jax-")
    assert line.endswith(": No space left on device")
    assert stored(tmp_path) == []


def test_the_lines_of_a_program_are_its_own_though_another_was_stored(tmp_path, events):
    keep(tmp_path)
    rows = shoal.put(np.ones((8, 8), np.float32), NamedSharding(shoal.make_mesh({"x": -1}), P("x")))
    first = jax.jit(lambda x: jnp.tanh(x).sum(0))
    second = jax.jit(lambda x: jnp.tanh(x).sum(0))  # one line below
    lines = [
        int(movement.source.partition(":")[2].split()[0])
        for jitted in (first, second)
        for movement in shoal.explain_program(jitted, rows).movements
    ]
    assert lines[1] == lines[0] + 1


def test_a_directory_that_cannot_be_used_is_a_line(tmp_path, events):
    (tmp_path / "file").write_text("")
    line = keep(tmp_path / "file")
    assert line == f"no compile cache: {tmp_path}/file: File exists"
    assert compute() == pytest.approx(RESULT)


@pytest.mark.parametrize(("is_asked", "says"), [(True, True), (False, False)])
def test_the_own_cache_of_jax_that_is_set_before_is_used(tmp_path, events, is_asked, says):
    own = tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", str(own))
    line = keep(tmp_path / "ours", is_asked=is_asked)
    message = f"initialize(compile_cache=) has no effect: jax_compilation_cache_dir is {own}"
    assert line == message * says
    own_cache(tmp_path)


def test_the_own_cache_of_jax_that_is_set_later_is_used_from_then_on(tmp_path, events):
    keep(tmp_path / "ours")
    compute()
    (ours,) = stored(tmp_path)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    own_cache(tmp_path)
    ours.unlink()
    assert compute() == pytest.approx(RESULT)
    assert stored(tmp_path / "ours") == []


def own_cache(tmp_path: Path) -> None:
    """Check that JAX stores in its own cache."""
    before = stored(tmp_path / "ours") if (tmp_path / "ours").exists() else []
    with jax_option("jax_persistent_cache_min_compile_time_secs", 0.0):
        assert compute() == pytest.approx(RESULT)
    assert [path for path in stored(tmp_path / "own") if path.name.endswith("-cache")]
    assert (stored(tmp_path / "ours") if (tmp_path / "ours").exists() else []) == before


class jax_option:
    """A block in which an option of JAX has another value."""

    def __init__(self, name: str, value: object) -> None:
        self._name, self._value = name, value

    def __enter__(self) -> None:
        self._before = getattr(jax.config, self._name)
        jax.config.update(self._name, self._value)

    def __exit__(self, *_: object) -> None:
        jax.config.update(self._name, self._before)


def test_a_later_job_without_a_cache_has_none(tmp_path, events):
    keep(tmp_path)
    assert jax_runtime.keep_compiled(False, is_asked=True) == ""
    compute()
    assert stored(tmp_path) == []


@pytest.mark.parametrize("changed", ["gone", "other parameters"])
def test_a_jax_without_the_hooks_keeps_its_own_cache(tmp_path, events, monkeypatch, changed):
    if changed == "gone":
        monkeypatch.delattr(compiler, "_cache_write")
    else:
        monkeypatch.setattr(compiler, "_cache_write", lambda executable, cache_key: None)
    line = keep(tmp_path)
    name = "jax._src.compiler._cache_write(cache_key, compile_time_secs, module_name, backend, "
    assert line.startswith(f"no compile cache: JAX {jax.__version__} has no {name}executable)\n")
    assert stored(tmp_path) == []


@pytest.mark.parametrize(
    ("platform", "processes", "serves"),
    [("cpu", 2, True), ("tpu", 2, True), ("gpu", 1, True), ("gpu", 2, False), ("cuda", 2, False)],
)
def test_accelerators_that_compile_together_are_not_served(
    tmp_path, events, monkeypatch, caplog, platform, processes, serves
):
    monkeypatch.setattr(distributed.global_state, "num_processes", processes)
    keep(tmp_path)
    backend = types.SimpleNamespace(platform=platform)
    cache = compilation_cache._cache
    assert [cache.serves(backend), cache.serves(backend)] == [serves, serves]
    lines = [record for record in caplog.records if record.name == "shoal"]
    assert len(lines) == (not serves)
    assert all(line.levelno == logging.WARNING for line in lines)
