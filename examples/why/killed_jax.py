"""Four processes train. Process 2 is killed in step 50."""

import os
import signal
import sys

import jax
from jax.experimental import multihost_utils

address, count, index = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(index))
for step in range(100):
    if step == 50 and jax.process_index() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    multihost_utils.sync_global_devices("step")
