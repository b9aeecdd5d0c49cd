"""Files: what is there at each moment of a save, and after a crash. Works without JAX."""
