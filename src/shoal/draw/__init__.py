"""Pictures of meshes, layouts, arrays and topologies, and of a job that runs.

`mesh`, `layout` and `tree` say what is to be seen, as a `media.picture`; `wiring` does so for a
mesh on its hardware. `page` and `notebook` show them; `describe` is what programs call. `ribbons`
are what a move sends over each class of links, `roll` is the table of a job's processes; `bars` are
amounts side by side, `amounts` bytes and seconds as text.

Decides nothing and measures nothing: it draws what it is given. Does
not know how a job is reached, nor how arrays move.
"""
