"""Used inside `jit`: constraints, values sharded alike, manual regions, fences.

Does not know where data comes from.
"""
