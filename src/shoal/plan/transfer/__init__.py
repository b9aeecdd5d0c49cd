"""From one layout to another: what must move, at least how much, and in which steps.

* `regions`, `bounds`: what must move between devices, and how little of it there can be.
* `digits`, `states`, `collective`: a shortest path of collectives among devices of one mesh.
* `point_to_point`: sends at the bound, between any devices.
* `steps`, `plan`: the values that say it.
"""
