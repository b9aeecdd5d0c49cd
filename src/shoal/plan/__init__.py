"""Decides. Moves nothing. Pure NumPy: never imports JAX."""
