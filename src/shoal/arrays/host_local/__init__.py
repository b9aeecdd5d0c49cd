"""Per-process arrays ⇄ one global array, with gradients and batching rules.

Does not know about batches, nor what is traced.
"""
