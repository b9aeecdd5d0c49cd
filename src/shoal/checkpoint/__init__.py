"""Sharded state on disk: committed or absent, every byte checked, any mesh to any mesh.

* `format`, `names`, `tree`, `dtypes`, `header`: what the files say. NumPy only, like `plan`.
* `chunks`, `reading`: which process writes, or reads, which bytes. NumPy only.
* `storage`, `attempts`, `writer`, `reader`, `history`: files; they work where JAX is missing.
* `state`, `save`, `restore`, `placing`: device arrays on their way to and from files.
"""
