"""Decides. Moves nothing. Pure NumPy: never imports JAX.

* `mesh` (with `mesh_checks`, `mesh_text`): named axes over a grid of device ids.
* `layout`: which axes split which dims.
* `shards` (with `writers`): who holds which region, and who writes it.
* `hlo`: a layout in XLA's words.
* `topology` (with `wiring`, `hosts`, `tpu_generations`), `placement`: hardware, and meshes on it.
* `cost` (with `links`, `torus_cost`, `switched_cost`, `routing`): what collectives cost on it.
* `transfer`: what moves between two layouts, the least it takes, and plans of it.
* `patterns`: which leaves of a tree a pattern names.
* `text`: the words of the text forms.
"""
