"""Sharded checkpoints: committed or absent, checksummed throughout, from any mesh to any mesh.

* `history`: the steps of a run. `saving`, `restoring`: one save, one restore, phase by phase.
* `coordination`: how the processes of one save or restore coordinate.
* `blocks`: data between memory and files. `store`: what every place of a checkpoint promises.
  `disk`, `bucket`: a directory and objects that keep it. `at`: the store at a path.
* `planning`: which process writes and reads which bytes, which steps are kept. `format`: the file
  format.
* `tree`: a pytree as named leaves.

`blocks`, `store`, `disk`, `bucket`, `planning`, `format` and `tree`, except `tree/jax_nodes`, never
import JAX: a checkpoint can be listed, verified and read where `import jax` fails.
"""
