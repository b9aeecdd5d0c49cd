"""What programs move without being asked to: found in what the compiler made of them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal.errors import UsageError
from shoal.plan.layout import Layout
from shoal.plan.mesh import Mesh

CUBE = Mesh({"a": 2, "b": 2, "c": 2})
SOURCE, TARGET = Layout(CUBE, "c", "b"), Layout(CUBE, ("c", "b", "a"), None)


def here(marker):
    """Return this file's line with a marker."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


def array():
    return shoal.put(np.ones((64, 64), np.float32), SOURCE)


def test_a_gather_that_is_cut_again_is_found_with_its_line_and_its_mend():
    def program(x):
        y = x * 2
        z = jnp.sin(y)  # gathered
        return shoal.constrain(z, TARGET) + 1

    report = shoal.explain_program(jax.jit(program), array())
    assert {movement.kind for movement in report.hidden} == {"gathered"}
    assert (
        report.received_bytes
        == sum(movement.received_bytes for movement in report.hidden)
        == 12 * 1024
    )
    lines = {here("gathered"), here("gathered") - 1}  # on which of both, XLA decides
    assert all(any(f":{n} (" in movement.source for n in lines) for movement in report.hidden)
    assert "via=plan_relayout" in str(report)

    plan = shoal.plan_relayout(array(), TARGET)
    mended = jax.jit(lambda x: shoal.constrain(jnp.sin(x * 2), TARGET, via=plan) + 1)
    better = shoal.explain_program(mended, array())
    assert not better.hidden
    assert better.received_bytes == plan.received_bytes == 1024


def test_operands_that_lie_otherwise_and_sums():
    def program(x):
        return (x @ x.T).sum(0)  # moved

    report = shoal.explain_program(jax.jit(program), array())
    assert {movement.kind for movement in report.movements} == {"moved", "summed"}
    assert all(f":{here('moved')} (" in movement.source for movement in report.movements)
    assert {movement.operation for movement in report.hidden} <= {"dot_general", "transpose"}
    assert str(report).index(report.hidden[0].operation) < str(report).index("reduce_sum")


def test_collectives_written_in_the_program_are_not_hidden():
    total = shoal.manual(lambda x: jax.lax.psum(x, "a"), Layout(CUBE, "a"), None)
    x = shoal.put(np.ones(8, np.float32), Layout(CUBE, "a"))
    report = shoal.explain_program(jax.jit(total), x)
    assert [(movement.kind, movement.opcode) for movement in report.movements] == [
        ("written", "all-reduce")
    ]
    assert not report.hidden


def test_explain_program_takes_abstract_arrays():
    x = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=shoal.named_sharding(SOURCE))
    report = shoal.explain_program(jax.jit(lambda x: x + 1), x)
    assert (report.movements, report.received_bytes) == ((), 0)


def test_no_jitted_function():
    with pytest.raises(UsageError, match="is not a jitted function"):
        shoal.explain_program(lambda x: x, array())
