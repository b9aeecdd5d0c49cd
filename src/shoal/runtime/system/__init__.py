"""This machine and this process: cores, devices, call sites, stacks, child processes.

Uses only the operating system and Python; knows nothing of a job.
"""
