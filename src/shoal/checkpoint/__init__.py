"""Sharded state on disk: committed or absent, every byte checked, any mesh to any mesh.

* `history`: the steps of a run. `saving`, `restoring`: one save, one restore, phase by phase.
* `together`: what processes say to each other while they do it.
* `blocks`: memory to files and back. `disk`: files, at each moment and after a crash.
* `planning`: who writes and reads which bytes. `format`: what the files say. `tree`: named leaves.
* `retention`: which steps are kept; users import its policies by name.

Everything but `saving`, `restoring` and `tree/jax_nodes` works where `import jax` fails.
"""
