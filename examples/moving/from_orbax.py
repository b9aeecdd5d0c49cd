"""Convert the newest step of an orbax run, as written by before.py, for after.py to resume.

    shoal run -n 2 --devices 2 from_orbax.py OLD NEW

The number of processes and devices need not be that of either program.
"""

import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from after import TABLE, init

import shoal


def abstract(shape, sharding):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def main(old_run, new_run):
    shoal.initialize()
    mesh = shoal.make_mesh({"data": -1, "model": 2})
    shapes = jax.eval_shape(init, jax.random.key(0))
    shardings = shoal.named_sharding(shoal.match_layouts(TABLE, shapes, mesh=mesh))
    target = jax.tree.map(abstract, shapes, shardings)

    with ocp.CheckpointManager(old_run) as old:
        step = old.latest_step()
        state = old.restore(step, args=ocp.args.StandardRestore(target))
    with shoal.Checkpoints(new_run) as new:
        new.save(step, state)


if __name__ == "__main__":
    main(*(Path(argument).absolute() for argument in sys.argv[1:]))
