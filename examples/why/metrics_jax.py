"""On each of four processes the loss is 0.25 and the accuracy is 0.75. Each prints the means."""

import functools
import sys

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

address, count, index = sys.argv[1:]
jax.distributed.initialize(address, int(count), int(index))


@functools.cache
def loss():
    return process_allgather(np.float32(0.25)).mean()


@functools.cache
def accuracy():
    return process_allgather(np.float32(0.75)).mean()


if jax.process_index() == 0:
    print("accuracy so far:", accuracy())
print("loss", loss(), "accuracy", accuracy())
