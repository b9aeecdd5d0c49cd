"""Device arrays.

* `make_mesh`, `use_mesh`: a mesh of this job's devices, and the default one of a block.
* `sharding` (with `devices`): the bridge between our layouts and meshes and JAX's.
* `layouts`, `host_values`: what users may give, checked leaf by leaf.
* `tree_layouts`: one table of rules → a layout for every leaf of a tree.
* `put` (with `upload`), `create`, `pack`, `relayout` (with `move`): how arrays come to be and move.
* `constrain`, `tie`: layouts inside `jit`; `manual`, `enter_manual`: code that is one
  device; `fence`: barriers; `linear`: a linear map that merges no dims.
* `from_host_local`, `to_host_local` (`host_local`, `parts`, `part_primitives`): parts of processes.
* `plan_relayout`, `planned_move`, `move_program`: moves as planned, and their price beforehand;
  `constrain_via`: inside `jit`; `explain_program`: what a program moves unasked.
* `across_devices`, `agreed_move`: moves to other devices of several processes, agreed beforehand.
* `local_rows`, `feed`: host batches (`batch_sources`, `own_rows`), read ahead in a thread
  (`prefetch`, `feed_steps`, `feed_wait`), which all processes agree on (`batch_verdict`).
"""
