"""Memory to files and back, block by block, each hashed and verified. Works without JAX.

Knows one process's part of one checkpoint; knows no other process and no device.
"""
