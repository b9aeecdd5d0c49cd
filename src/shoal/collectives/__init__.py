"""Collectives on values between processes; one operation, one file.

* `wire`, `leaves`: a tree of values as bytes, bit-exactly, and what must be equal for that.
* `broadcast`, `allgather`: one process's values on all; all processes' values side by side.
* `same`, `program`: check that all processes hold equal values, or compile the same program.
* `sync_devices`: every device of a mesh has finished what was issued before.
* `live_processes`: which processes are alive, agreed by all of them.
* `transport`: values too large for one message.

Knows processes and arrays; knows no file.
"""
