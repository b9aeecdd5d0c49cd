"""Pictures of meshes, layouts, arrays and topologies, and of a running job.

`mesh`, `layout` and `tree` build a `media.picture`; `wiring` does so for a mesh on its hardware.
`page` and `notebook` show them; `describe` is the API for programs. `ribbons` shows the traffic of
a move per class of links, `roll` is the table of a job's processes; `bars` compare amounts,
`amounts` formats bytes and seconds.

Decides nothing and measures nothing: it draws what it is given. Does not
know how a job is reached, nor how arrays move.
"""
