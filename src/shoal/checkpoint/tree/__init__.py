"""A pytree as named leaves and a serializable structure.

Knows no file and no format; only `jax_nodes` knows JAX.
"""
