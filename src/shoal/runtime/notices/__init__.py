"""Who says that this process must stop: signals, files, and what clouds say of their machines.

Knows the rules of stopping. Does not know the meeting place, nor how a process leaves its job.
"""
