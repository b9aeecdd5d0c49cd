"""Move device arrays to other layouts: planned, compiled, staged or copied.

Does not know where arrays come from, nor what runs inside a user's `jit`.
"""
