"""Meshes and layouts ⇄ JAX's devices and shardings: the only conversion.

Knows no values of arrays.
"""
