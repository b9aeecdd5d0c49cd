"""On each of four processes the loss is 0.25 and the accuracy is 0.75. Each prints the means."""

import functools

import numpy as np

import shoal

shoal.initialize()


@functools.cache
def loss():
    return shoal.allgather(np.float32(0.25)).mean()


@functools.cache
def accuracy():
    return shoal.allgather(np.float32(0.75)).mean()


if shoal.process_index() == 0:
    print("accuracy so far:", accuracy())
print("loss", loss(), "accuracy", accuracy())
