"""A state as named leaves and a structure that can be written down.

Knows no file and no format; only `jax_nodes` knows JAX.
"""
