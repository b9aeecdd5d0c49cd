"""Who says that this process must stop: signals, files, and what clouds say of their machines.

Knows only the rules of stopping: not the meeting place, nor how a process leaves its job.
"""
