"""Values between processes; one operation, one file.

* `wire`, `leaves`: a tree of values as bytes, bit-exactly, and what must be equal for that.
* `broadcast`, `allgather`: one process's values given to all; all processes' side by side.
* `same`, `program`: every process holds equal values, compiles the same program.
* `drain`: every device of a mesh has finished what was issued before.
* `live`: who is alive, agreed by all of them.
* `transport`: values too large for one message.

Knows processes and arrays; knows no file.
"""
