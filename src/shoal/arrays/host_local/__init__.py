"""Per-process arrays ⇄ one global array, with their gradients and batching rules.

Does not know about batches, nor what is traced.
"""
