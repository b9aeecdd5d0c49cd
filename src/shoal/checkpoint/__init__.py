"""Sharded state on disk: committed or absent, every byte checked, any mesh to any mesh.

* `history`: the steps of a run. `saving`, `restoring`: one save, one restore, phase by phase.
* `together`: what processes say to each other while they do it.
* `blocks`: memory to files and back. `disk`: files, at each moment and after a crash.
* `planning`: who writes and reads which bytes. `format`: what the files say. `tree`: named leaves.
* `retention`: which steps are kept; users import its policies by name.

`blocks`, `disk`, `planning`, `format` and `tree`, but for `tree/jax_nodes`, never import JAX: what
is saved can be listed, verified and read where it is missing.
"""
