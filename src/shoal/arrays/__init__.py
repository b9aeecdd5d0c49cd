"""Device arrays: creating them, moving them, and pinning their layouts inside `jit`.

Here: `make_mesh`, a mesh of this job's devices, and `match_layouts` (with `placed`), one table of
rules for a whole tree. Each directory knows only those below it:

* `feeding`: host batches, prefetched and agreed on. `host_local`: per-process arrays ⇄ global ones.
* `traced`: what is used inside `jit`.
* `placing`: new arrays: `put`, `create`, `pack`.
* `moving`: `relayout` and its plans, and each transport of a move.
* `host`: host values, checked, hashed, uploaded.
* `bridge`: meshes and layouts ⇄ JAX's devices and shardings.

Does not know how values travel between processes outside of arrays (`collectives`).
"""
