"""A pytree as named leaves and a serialisable structure.

Knows no file and no format; only `jax_nodes` knows JAX.
"""
