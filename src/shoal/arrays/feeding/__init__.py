"""Feed batches: which rows each process reads, prefetched, agreed on and placed.

Does not know programs: it only hands arrays to them.
"""
