"""Move data between memory and files in blocks, each hashed and verified. Works without JAX.

Knows one process's part of one checkpoint; knows no other process and no device.
"""
