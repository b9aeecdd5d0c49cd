"""Process 1 has read another learning rate than the other processes."""

import numpy as np

import shoal

shoal.initialize()
rate = np.float32(0.1 if shoal.process_index() == 1 else 0.01)
mesh = shoal.make_mesh({"data": -1})
array = shoal.put(rate, mesh)  # replicated on it
shoal.barrier("start")
print("replicated:", array.is_fully_replicated, "value:", array)
