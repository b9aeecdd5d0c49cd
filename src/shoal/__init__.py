"""shoal: the missing multi-host layer for JAX."""
