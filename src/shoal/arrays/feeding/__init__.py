"""Batches: which rows a process reads, read ahead, agreed on and placed.

Does not know programs: it only hands arrays to them.
"""
