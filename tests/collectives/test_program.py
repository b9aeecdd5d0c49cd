"""`assert_same_program`: a process that would run something else is found before it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from collectives.thread_jobs import PATIENCE_S, run_all
from shoal.collectives.program import assert_same_program
from shoal.errors import DivergenceError, UsageError, UsageTypeError
from shoal.runtime.client.in_process import LocalJob

X = jax.ShapeDtypeStruct((3000,), np.float32)


def compare(*functions, args=(X,), **options):
    """Let each process compare its function under jit; return what each got or raised."""
    job = LocalJob(len(functions), hosts=[f"h{i}" for i in range(len(functions))])

    def go(client):
        jitted = jax.jit(functions[client.process])
        return assert_same_program.on(client, jitted, *args, timeout_s=PATIENCE_S, **options)

    return run_all(job, go)


def times(constant):
    def step(x):
        return x * constant + 1

    return step


def test_equal_programs_pass():
    assert compare(times(2.0), times(2.0), times(2.0)) == [None] * 3
    assert_same_program(jax.jit(times(3.0)), 1.0)
    assert_same_program(jax.jit(times(3.0)).lower(X))
    assert_same_program(jax.jit(lambda x, *, by: x + by), 1.0, by=2.0)


def test_the_addresses_of_callbacks_are_not_compared():
    def looking():
        def step(x):
            jax.debug.inspect_array_sharding(x, callback=lambda sharding: None)
            return x + 1

        return step

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    split = jax.ShapeDtypeStruct((8,), np.float32, sharding=NamedSharding(mesh, P("data")))
    assert compare(looking(), looking(), args=(split,)) == [None] * 2


def test_a_constant_that_depends_on_the_process_is_found_and_shown():
    errors = compare(times(1.0), times(2.0), times(1.0))
    for process, error in enumerate(errors):
        assert type(error) is DivergenceError
        assert error.sides == errors[0].sides
        first, call, location, *rows = str(error).splitlines()
        assert (
            first == f"process {process} of 3 (h{process}): processes compiled different programs"
        )
        assert call.startswith("  assert_same_program at ")
        assert "test_program.py:" in call
        line = "first difference, line 3 of the StableHLO text, after: func.func public @main"
        assert line in location
        assert rows == [
            "    process 1: %cst = stablehlo.constant dense<2.000000e+00> : tensor<f32>",
            "    processes 0, 2: %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>",
            "Numbers of Python are compiled in: make them equal, or pass them as arguments.",
        ]
        difference = error.difference
        assert (difference.what, difference.path) == ("program", "line 3 of the StableHLO text")


def test_a_long_constant_is_shown_where_it_differs():
    constants = [np.arange(3000, dtype="f4") for _ in range(2)]
    constants[1][2900] = -1
    for error in compare(*map(times, constants)):
        assert type(error) is DivergenceError
        assert len(str(error)) < 1500
        one, other = error.sides
        assert one != other
        assert "000080BF" in other  # -1.0, in the bytes that the text shows


def test_programs_of_other_operations_and_shapes_diverge():
    for error in compare(times(2.0), lambda x: x * 2, lambda x: (x * 2).sum()):
        assert type(error) is DivergenceError
        assert sorted(error.sides.values()) == [(0,), (1,), (2,)]
    other = [jax.ShapeDtypeStruct((n,), np.float32) for n in (3, 4)]

    def go(client):
        jitted = jax.jit(jnp.sin)
        shape = other[client.process]
        return assert_same_program.on(client, jitted, shape, timeout_s=PATIENCE_S)

    for error in run_all(LocalJob(2), go):
        assert "tensor<3xf32>" in str(error)
        assert "tensor<4xf32>" in str(error)


def test_a_name_declares_calls_to_be_one():
    job = LocalJob(2)
    jitted = jax.jit(times(2.0))

    def go(client, **name):
        if client.process:
            return assert_same_program.on(client, jitted, X, timeout_s=PATIENCE_S, **name)
        return assert_same_program.on(client, jitted, X, timeout_s=PATIENCE_S, **name)

    assert [type(error) for error in run_all(job, go)] == [DivergenceError] * 2
    assert run_all(job, lambda c: go(c, name="train step")) == [None, None]


def test_assert_same_program_refuses_functions_that_cannot_be_lowered():
    first = LocalJob(2).clients[0]
    for wrong in (times(2.0), 3, "x"):
        with pytest.raises(UsageTypeError, match="cannot be lowered"):
            assert_same_program.on(first, wrong, X)
    with pytest.raises(UsageTypeError, match="takes no arguments"):
        assert_same_program.on(first, jax.jit(times(2.0)).lower(X), X)
    with pytest.raises(UsageError, match="timeout_s"):
        assert_same_program.on(first, jax.jit(times(2.0)), X, timeout_s=-1)
