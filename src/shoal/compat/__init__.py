"""The predecessors' own names, a few lines each onto ours: change the import, keep the program.

`shoal.compat.multihost_utils` stands for `jax.experimental.multihost_utils`,
`shoal.compat.torch_xla` for `torch_xla.distributed.spmd`, `shoal.compat.dtensor` for
`tf.experimental.dtensor`. A facade decides, sends and places nothing itself, and knows no other
facade. Its errors are ours, and also what the predecessor raised.
"""
