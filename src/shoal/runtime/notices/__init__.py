"""Sources of preemption notices: signals, files, and cloud metadata.

Knows the rules of stopping. Does not know the meeting place, nor how a process leaves its job.
"""
