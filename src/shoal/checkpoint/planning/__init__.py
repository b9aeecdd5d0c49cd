"""Who writes and reads which bytes, which steps are kept, which casts lose nothing.

Decides and moves nothing. Knows the format; knows no file, no folder and no JAX.
"""
