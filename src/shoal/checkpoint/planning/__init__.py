"""Who writes and reads which bytes, which steps are kept, which casts lose nothing.

Decides and moves nothing: no file, no JAX; knows the format and NumPy.
"""
