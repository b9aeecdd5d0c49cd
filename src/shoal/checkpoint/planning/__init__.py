"""Decide which process writes and reads which bytes, when to save, and which casts are lossless.

Moves nothing: no file, no JAX; knows the format and NumPy.
"""
