"""Meshes and layouts ⇄ JAX's devices and shardings. Nothing else converts.

Knows no value of any array.
"""
