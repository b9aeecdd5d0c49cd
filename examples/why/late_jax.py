"""Process 1 reaches the first barrier, and never the second."""

import sys
import time

import jax
from jax.experimental import multihost_utils

address, count, index = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(index))
multihost_utils.sync_global_devices("start")
if jax.process_index() == 1:
    time.sleep(3600)
multihost_utils.sync_global_devices("data is ready")
