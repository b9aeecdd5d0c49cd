"""Train with flags of absl: every process must have the same ones.

    shoal run -n 2 --devices 2 absl_flags.py --folder run --steps 4
    shoal run -n 1 --devices 8 absl_flags.py --folder run --steps 8      # four more, on 8 devices

Needs absl-py, which comes with optax and orbax.
"""

import jax
import numpy as np
from absl import app, flags, logging
from jax import P

import shoal

FOLDER = flags.DEFINE_string("folder", None, "The directory for checkpoints.", required=True)
STEPS = flags.DEFINE_integer("steps", 4, "The number of steps.", lower_bound=1)
RATE = flags.DEFINE_float("rate", 0.1, "The learning rate.")


def main(_):
    shoal.initialize()
    shoal.assert_same(flags.FLAGS.flag_values_dict())  # an error if a process has other flags
    mesh = shoal.make_mesh({"data": -1})
    train = jax.jit(lambda w, x: w - RATE.value * (w - x.mean(0)))
    with shoal.use_mesh(mesh), shoal.Checkpoints(FOLDER.value, keep=2) as ckpts:
        state, first = ckpts.resume({"w": P()}, {"w": shoal.put(np.zeros(4, np.float32), P())})
        for step in range(first, STEPS.value):
            with shoal.step(step):
                x = shoal.put(np.full((8, 4), step, np.float32), P("data"))
                state = {"w": train(state["w"], x)}
            stop = shoal.preempted(step)
            ckpts.save(step, state)
            if shoal.process_index() == 0:
                logging.info("step %d w %.4f", step, float(state["w"][0]))
            if stop:
                break
    return shoal.preemption.exit_code()  # the code of the process: app.run calls sys.exit


if __name__ == "__main__":
    app.run(main)
