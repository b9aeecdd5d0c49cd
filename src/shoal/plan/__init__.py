"""Planning: decides what to move where, and moves nothing. Pure NumPy: never imports JAX.

For users: `mesh`, `layout`, `shards` (who holds and writes what), `hlo`, `topology`, `placement`,
`cost`, `compiled` (programs, parsed from the text of their HLO). Beside them: `rows`,
`process_boxes`, `hlo_reading`, `torus_order`, `patterns`. In folders:

* `transfer`: what moves between two layouts, lower bounds, and plans.
* `hardware`: chips, links, hosts. `schedules`: collectives over links, stage by stage.
* `orders`: the device orders of other libraries. `notation`: text forms.
"""
