"""Sharded checkpoints: committed or absent, checksummed throughout, from any mesh to any mesh.

* `history`: the steps of a run. `saving`, `restoring`: one save, one restore, phase by phase.
* `together`: how the processes of one save or restore coordinate.
* `blocks`: data between memory and files. `disk`: crash-safe files and the commit protocol.
* `planning`: which process writes and reads which bytes. `format`: the file format.
* `tree`: a pytree as named leaves.
* `retention`: which steps to keep; users import its policies by name.

`blocks`, `disk`, `planning`, `format` and `tree`, except `tree/jax_nodes`, never import JAX: a
checkpoint can be listed, verified and read where `import jax` fails.
"""
