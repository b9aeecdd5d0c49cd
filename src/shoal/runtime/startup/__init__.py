"""How a process becomes a member of its job: its index, its services, its devices.

Knows every other directory of `runtime` but `server` and `notices`. Does not know what a job does
once it has begun.
"""
