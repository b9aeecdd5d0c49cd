"""Planning: decides what to move where, and moves nothing. Pure NumPy: never imports JAX.

For users: `mesh`, `layout`, `shards`, `hlo`, `topology`, `placement`, `cost`. Beside them: `rows`,
`process_boxes`, `write_shares`, `boxes` (which process holds and writes what), `hlo_reading`,
`torus_order`, `host_blocks`, `hop_counts` (device orders), `patterns`, `primes`. In folders:

* `transfer`: what moves between two layouts, lower bounds, and plans.
* `hardware`: chips, links, hosts. `schedules`: collectives over links, stage by stage.
* `orders`: the device orders of other libraries. `notation`: text forms.
* `compiled`: compiled programs, parsed from the text of their HLO.
"""
