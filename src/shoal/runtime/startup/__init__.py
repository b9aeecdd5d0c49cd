"""How a process becomes a member of its job: its numbers, its services, its devices.

Knows every other folder of `runtime`; the verbs above it are the only ones that import it.
"""
