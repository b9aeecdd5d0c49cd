"""Programs that differ have lines that do; equal ones have equal lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shoal.arrays.host.program_lines import program_lines
from shoal.runtime.failures.comparison import compare_lines

_A = np.arange(4, dtype=np.float32).reshape(2, 2)


def _gathered(mode):
    return lambda: jnp.asarray(_A).at[jnp.array([0, 5])].get(mode=mode)


PAIRS = {
    "nested tuples": [
        lambda p=p: lax.dot_general(_A, _A, (((1,), (p,)), ((), ()))) for p in (0, 1)
    ],
    "padding": [
        lambda p=p: lax.pad(jnp.asarray(_A), np.float32(0), ((p, 1 - p, 0), (0, 0, 0)))
        for p in (0, 1)
    ],
    "an enum": [_gathered("clip"), _gathered("fill")],
    "a number": [lambda p=p: jnp.asarray(_A) + p for p in (0, 1)],
    "an axis": [lambda p=p: lax.cumsum(jnp.asarray(_A), p) for p in (0, 1)],
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_programs_that_differ(pair):
    first, second = (program_lines(jax.make_jaxpr(jax.jit(init))(), "it") for init in pair)
    again = program_lines(jax.make_jaxpr(jax.jit(pair[0]))(), "it")
    assert first == again
    assert first != second
    assert compare_lines([first[0], second[0]], "END")[0].what == "value"
