"""Used inside `jit`: constraints, ties, manual regions, fences.

Does not know where data comes from.
"""
