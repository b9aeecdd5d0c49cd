"""Device arrays: how they come to be, how they move, and what pins them inside `jit`.

Here: `make_mesh` (with `device_order`) and `tree_layouts` (with `placed`): a mesh of this job's
devices, and one table of rules for a whole tree. Each folder knows only those below it:

* `feeding`: host batches, read ahead and agreed on. `host_local`: per-process arrays ⇄ global ones.
* `traced`: what stands inside `jit`.
* `placing`: arrays that begin: `put`, `create`, `pack`.
* `moving`: `relayout` and its plans, and each way that a move can go.
* `host`: values on the host, checked, hashed, uploaded.
* `bridge`: meshes and layouts ⇄ JAX's devices and shardings.

Does not know how values travel between processes outside of arrays (`collectives`).
"""
