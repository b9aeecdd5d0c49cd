"""The predecessors' APIs as thin facades over shoal: change the import, keep the program.

`shoal.compat.multihost_utils` replaces `jax.experimental.multihost_utils`, `shoal.compat.torch_xla`
`torch_xla.distributed.spmd`, and `shoal.compat.dtensor` `tf.experimental.dtensor`. A facade
decides, sends and places nothing itself, and knows no other facade. Its errors are shoal's, and
also instances of the types that the predecessor raised.
"""
