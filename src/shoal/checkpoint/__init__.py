"""Sharded state on disk: committed or absent, every byte checked, any mesh to any mesh.

* `format`: what the files say. `rules`: who writes and reads which bytes, which steps are kept.
  NumPy only, like `plan`.
* `disk`: files at each moment of a save and after a crash. `blocks`: memory to files and back.
  They work where JAX is missing.
* `saving`, `restoring`: device arrays on their way to and from files, phase by phase.
* `save`, `restore`, `history`: what users call.
"""
