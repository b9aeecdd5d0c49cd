"""What JAX compiles for devices of several processes is noted, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler

import shoal
from shoal.runtime.jax_service import jax_runtime

# Between the program and the hook, in a file of JAX's: it shows the devices as two processes'.
AS_JAX = """
def compile_or_get_cached(backend, computation, devices, *more, **options):
    given.append((backend, computation, devices))
    return hooked(shown.backend, computation, shown.devices, *more, **options)
"""


@pytest.fixture
def noted(monkeypatch):
    """Return the notes, of a JAX that takes its devices for those of two processes."""
    programs, given, own = [], [], compiler.compile_or_get_cached

    def inner(backend, computation, devices, compile_options, *more, **options):
        return own(*given.pop(), compile_options, *more, **options)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(compiler, "compile_or_get_cached", inner)
    assert (
        jax_runtime.note_programs(lambda owners, program: programs.append((owners, program))) == ""
    )
    shown = SimpleNamespace(backend=SimpleNamespace(platform="cpu"), devices=devices_of(0, 1))
    scope = {"given": given, "hooked": compiler.compile_or_get_cached, "shown": shown}
    exec(compile(AS_JAX, compiler.__file__, "exec"), scope)
    monkeypatch.setattr(compiler, "compile_or_get_cached", scope["compile_or_get_cached"])
    return SimpleNamespace(all=programs, shown=shown)


def devices_of(*processes: int) -> np.ndarray:
    """Return devices, one for each of these processes."""
    return np.array([SimpleNamespace(process_index=p, id=n) for n, p in enumerate(processes)])


def compiled(noted, function, *args):
    """Compile a function; return how it was noted."""
    noted.all.clear()
    jax.jit(function)(*args)
    owners, program = noted.all[0]  # those of callbacks come later
    assert owners == [0, 1]
    return program


X = np.ones(8, "float32")


def scaled(rate):
    return lambda x: x * rate


def test_a_program_is_noted_with_its_name_types_and_line(noted):
    def step(x, y):
        return x + y

    program = compiled(noted, step, X, X)
    assert program[1:4] == ("jit(step)", "f32[8], f32[8]", 2)
    assert "test_note_programs.py:" in program.site


def test_call_of_a_compiled_program_is_not_a_compilation(noted):
    step = jax.jit(scaled(2.0))
    step(X)
    noted.all.clear()
    step(X)
    assert noted.all == []


def test_an_eager_operation_is_noted(noted):
    jnp.asarray(X) / 7.25
    assert "jit(true_divide)" in [program.name for _, program in noted.all]


def test_equal_programs_have_one_digest_and_others_another(noted):
    first, alike, other = (compiled(noted, scaled(rate), X) for rate in (0.1, 0.1, 0.2))
    assert first.digest == alike.digest != other.digest
    assert first[1:] == other[1:]


def test_the_lines_of_a_program_are_no_part_of_it(noted):
    jax.jit(lambda x: x + 1)(X)
    jax.jit(lambda x: x + 1)(X)
    (_, first), (_, second) = noted.all
    assert first.digest == second.digest
    assert first.site != second.site


def test_callbacks_have_no_addresses(noted):
    def traced(offset):
        return lambda x: jax.pure_callback(lambda v: v + offset, X, x)

    assert compiled(noted, traced(1), X).digest == compiled(noted, traced(1), X).digest


def test_large_constants_are_not_printed(noted):
    rng = np.random.default_rng(3)
    first, second = (compiled(noted, scaled(rng.random(64).astype("f4")), np.ones(64, "f4"))
                  for _ in range(2))  # fmt: skip
    assert first.digest == second.digest


def test_programs_of_one_process_are_not_noted(noted):
    noted.shown.devices = devices_of(1, 1)
    jax.jit(scaled(3.0))(X)
    assert noted.all == []


@pytest.mark.parametrize("owners", [(1, 2), (0, 3)])
def test_programs_of_others_alone_or_of_a_topology_are_not_noted(noted, owners):
    noted.shown.devices = devices_of(*owners)
    jax.jit(scaled(3.0))(X)
    assert noted.all == []


def test_programs_of_a_part_of_a_tpu_are_not_noted(noted, monkeypatch):
    noted.shown.backend = SimpleNamespace(platform="tpu")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    jax.jit(scaled(3.0))(X)
    assert noted.all == []


def test_the_programs_that_shoal_runs_are_left_out(noted):
    with_shoal = f"{shoal.__path__[0]}/arrays/moving/relayout.py"
    namespace = {"jax": jax, "__name__": "shoal.arrays.moving.relayout"}
    exec(compile("jax.jit(lambda x: x - 3)(1.0)", with_shoal, "exec"), namespace)
    assert noted.all == []


def test_a_note_that_fails_does_not_fail_the_program(noted, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(jax_runtime, "_note", refuse)
    assert float(jax.jit(scaled(4.0))(X)[0]) == 4.0


def test_compilation_is_hooked_only_once(monkeypatch):
    monkeypatch.setattr(compiler, "compile_or_get_cached", compiler.compile_or_get_cached)
    for _ in range(2):  # a process may join one job after another
        assert jax_runtime.note_programs(lambda owners, program: None) == ""
        wrapped = compiler.compile_or_get_cached.shoal_wraps
    assert not hasattr(wrapped, "shoal_wraps")


def test_a_jax_without_the_place_does_without(monkeypatch):
    hooks = {"jax._src.compiler": ("compile_or_get_cached(computation, backend)",)}
    monkeypatch.setattr(jax_runtime, "PROGRAM_HOOKS", hooks)
    line = jax_runtime.note_programs(lambda owners, program: None)
    assert line.startswith(f"compiled programs are not noted: JAX {jax.__version__} has no ")
