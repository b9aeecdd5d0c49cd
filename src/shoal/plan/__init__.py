"""Decides. Moves nothing. Pure NumPy: never imports JAX.

What users import lies here: `mesh`, `layout`, `shards`, `hlo`, `topology`, `placement`, `cost`.
Beside them: `rows`, `process_boxes`, `write_shares`, `boxes` (who holds and writes what),
`hlo_reading`, `torus_order`, `host_blocks`, `hop_counts` (orders of devices), `patterns`, `primes`.
In folders:

* `transfer`: what moves between two layouts, the least it takes, and plans of it.
* `hardware`: chips, links, hosts. `schedules`: collectives over links, stage by stage.
* `orders`: the device orders of other libraries. `notation`: text forms.
* `compiled`: programs, read from the text of their HLO.
"""
