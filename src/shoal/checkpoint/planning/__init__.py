"""Decide which process writes and reads which bytes, when to save, and which casts are lossless.

Moves nothing. Knows the format and NumPy; knows no file, no directory and no JAX.
"""
